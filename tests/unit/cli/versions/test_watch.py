"""`watch`, `blame` and `diff-values` on the command line."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from icechunk_async.cli import webhook
from tests.unit.cli.conftest import run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.unit.cli.conftest import Sample


def test_commits_are_printed_oldest_first(sample: Sample, repository: Path) -> None:
    """A line each; with --json a document each."""
    shown = run("watch", repository, "--since", "main~2", "--count", "2")
    assert shown.exit_code == 0
    assert [line.split()[0] for line in shown.stdout.splitlines()] == [sample.v1, sample.tip]
    lines = run("watch", repository, "--since", "main~1", "--count", "1", "--json").stdout
    (document,) = map(json.loads, lines.splitlines())
    assert (document["snapshot_id"], document["parent_id"]) == (sample.tip, sample.v1)
    assert run("watch", repository, "nobody", "--count", "1").exit_code == 1


class _Receiver(BaseHTTPRequestHandler):
    """Takes events, after it failed once."""

    statuses: list[int]
    events: list[tuple[str, dict[str, object]]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status = self.statuses.pop(0) if self.statuses else 204
        self.events.append((self.headers["Content-Type"], json.loads(body)))
        self.send_response(status)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- its name
        pass


@pytest.fixture
def receiver() -> Iterator[tuple[str, type[_Receiver]]]:
    """Start a web server that takes events."""

    class Mine(_Receiver):
        statuses: list[int] = []  # noqa: RUF012 -- a class for each test
        events: list[tuple[str, dict[str, object]]] = []  # noqa: RUF012

    with ThreadingHTTPServer(("127.0.0.1", 0), Mine) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/hook", Mine
        server.shutdown()
        thread.join()


def test_events_are_sent_again_until_they_are_taken(
    repository: Path,
    sample: Sample,
    receiver: tuple[str, type[_Receiver]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In order, and with the snapshot's id, so that repetitions can be told."""
    pytest.importorskip("aiohttp", reason="--post needs the extra http")
    monkeypatch.setattr(webhook, "_FIRST_PAUSE_SECONDS", 0.001)
    url, server = receiver
    server.statuses += [503, 429]
    arguments = ("watch", repository, "--since", "main~2", "--post", url)
    done = run(*arguments, "--count", "2")
    assert done.exit_code == 0
    ids = [event["id"] for _, event in server.events]
    assert ids == [sample.v1, sample.v1, sample.v1, sample.tip]
    content_type, event = server.events[-1]
    assert content_type.startswith("application/cloudevents+json")
    assert (event["specversion"], event["type"]) == ("1.0", "io.icechunk.commit")
    assert event["subject"] == "main"
    assert event["source"] == repository.as_uri()
    assert isinstance(event["data"], dict)
    assert event["data"]["parent_id"] == sample.v1
    server.statuses.append(400)
    refused = run(*arguments, "--count", "1")
    assert refused.exit_code == 1
    assert "refuses the event" in " ".join(refused.stderr.split())
    assert run(*arguments[:-1], "ftp://x", "--count", "1").exit_code == 1


def test_events_that_were_not_taken_come_after_a_restart(
    repository: Path, sample: Sample, receiver: tuple[str, type[_Receiver]]
) -> None:
    """A commit is printed once its event was taken, so the last line tells where to continue."""
    pytest.importorskip("aiohttp", reason="--post needs the extra http")
    url, server = receiver
    server.statuses += [204, 400]
    stopped = run("watch", repository, "--since", "main~2", "--post", url, "--json")
    assert stopped.exit_code == 1
    printed = [json.loads(line)["snapshot_id"] for line in stopped.stdout.splitlines()]
    assert printed == [sample.v1]
    restarted = run(
        "watch", repository, "--since", printed[-1], "--post", url, "--json", "--count", "1"
    )
    assert restarted.exit_code == 0
    ids = [event["id"] for _, event in server.events]
    assert ids == [sample.v1, sample.tip, sample.tip]


def test_blame_lists_commits_with_their_chunks(repository: Path, sample: Sample) -> None:
    """Newest first, each with how many chunks it wrote last."""
    document = json.loads(run("tree", repository, "--json").stdout)
    path = next(it["path"] for it in document["nodes"] if it.get("shape"))
    found = run("blame", repository, path, "--json").json
    assert {it["snapshot_id"] for it in found["commits"]} <= {sample.v1, sample.tip}
    assert sum(it["chunks"] for it in found["commits"]) > 0
    assert "CHUNKS" in run("blame", repository, path).stdout
    assert run("blame", repository, "nowhere").exit_code == 1


@pytest.mark.parametrize("dark", [(), ("--dark",)])
def test_changes_and_authors_are_drawn(sample: Sample, tmp_path: Path, dark: tuple[str]) -> None:
    """As PNG; a file that cannot be written is named."""
    pytest.importorskip("matplotlib", reason="pictures need the extra demo")
    path = run("diff-values", sample.path, "v1", "main", "--json").json["arrays"][0]["path"]
    for number, command in enumerate(
        (("diff-values", sample.path, "v1"), ("blame", sample.path, path))
    ):
        file = tmp_path / f"{number}.png"
        assert run(*command, "--png", file, *dark).exit_code == 0
        assert file.read_bytes().startswith(b"\x89PNG")
        refused = run(*command, "--png", tmp_path / "none" / "x.png")
        assert refused.exit_code == 1
        assert "cannot be written" in " ".join(refused.stderr.split())


def test_values_that_changed_are_counted(sample: Sample) -> None:
    """A row for each array; with --json numbers; --path takes some of them."""
    document = run("diff-values", sample.path, "v1", "main", "--json").json
    assert (document["from_ref"], document["to_ref"]) == ("v1", "main")
    assert document["arrays"]
    for array in document["arrays"]:
        assert 0 <= array["changed"] <= array["cells"]
        assert len(array["first"]) == min(array["changed"], 10)
    changed = next(it for it in document["arrays"] if it["changed"])
    shown = run("diff-values", sample.path, "v1").stdout
    assert changed["path"] in shown
    assert f"{changed['changed']:,}" in shown
    one = run("diff-values", sample.path, "v1", "--path", changed["path"], "--json").json
    assert one["arrays"] == [changed]
    assert run("diff-values", sample.path, "main", "main").stdout == "No values changed.\n"
    assert run("diff-values", sample.path, "nobody").exit_code == 1
