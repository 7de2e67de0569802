"""`watch` on the command line."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from icechunk_async.cli.commands.versions import watch
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
        if 300 <= status < 400:
            self.send_header("Location", "/elsewhere")
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(200)
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
    monkeypatch.setattr(watch, "_FIRST_PAUSE_SECONDS", 0.001)
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


@pytest.mark.parametrize("status", [301, 302, 307])
def test_a_redirect_is_no_receipt(
    repository: Path, sample: Sample, receiver: tuple[str, type[_Receiver]], status: int
) -> None:
    """Followed by a GET without the event, a page that comes says nothing of it."""
    pytest.importorskip("aiohttp", reason="--post needs the extra http")
    url, server = receiver
    server.statuses.append(status)
    refused = run("watch", repository, "--since", "main~2", "--post", url, "--count", "1")
    assert (refused.exit_code, refused.stdout) == (1, "")
    message = " ".join(refused.stderr.split())
    assert f"status {status}" in message
    assert f"give --post its address, '{url.removesuffix('hook')}elsewhere'" in message
    assert [event["id"] for _, event in server.events] == [sample.v1]


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
