"""How commands end that cannot do what was asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import typer

from icechunk_async.cli.declaring import parse_pair, parse_time, run_and_show
from tests.unit.cli.conftest import run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.cli.conftest import Sample

NOBODY = "00000000000000000000"


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("log", "{none}"), "repository-not-found"),
        (("tree", "{none}", "--json"), "repository-not-found"),
        (("log", "gopher://x/y"), "unknown-scheme"),
        (("log", ""), "invalid-url"),
        (("init", "{sample}"), "repository-exists"),
        (("log", "{sample}", "none"), "not-found"),
        (("show", "{sample}", NOBODY), "snapshot-not-found"),
        (("log", "{sample}", "--as-of", "2001-01-01"), "snapshot-not-found"),
        (("log", "{sample}", "v1", "--as-of", "2001-01-01"), "invalid-input"),
        (("log", "{sample}", "--option", "colour=red"), "invalid-input"),
        (("diff", "{sample}", "main", "v1"), "invalid-input"),
        (("ls", "{sample}", "none"), "node-not-found"),
        (("ls", "{sample}", "a/../b"), "invalid-input"),
        (("cat", "{sample}", "small/c/1/1"), "node-not-found"),
        (("cat", "{sample}", "small"), "invalid-store-key"),
        (("cat", "{sample}", "small/c/0/0", "--authorize", "file:///x/"), "virtual-container"),
        (("branch", "list", "{none}"), "repository-not-found"),
    ],
)
def test_an_error_is_one_line(
    sample: Sample, tmp_path: Path, arguments: tuple[str, ...], kind: str
) -> None:
    """Exit code 1, nothing on standard output, a sentence with the kind, no traceback."""
    places = {"none": tmp_path / "none", "sample": sample.path}
    outcome = run(*(it.format(**places) for it in arguments))
    assert outcome.exit_code == 1
    assert outcome.stdout == ""
    assert outcome.stderr.startswith(f"Error ({kind}): ")
    assert outcome.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["log", "tree", "watch"])
def test_a_damaged_repository_names_the_commands_for_it(repository: Path, command: str) -> None:
    """In the line of the error, which stays one."""
    (repository / "repo").write_bytes(b"damaged")
    outcome = run(command, repository)
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    assert outcome.stderr.startswith("Error (format): ")
    assert outcome.stderr.count("\n") == 1
    for named in ("'icechunk-async verify'", "'icechunk-async repair'"):
        assert named in outcome.stderr


def test_one_failure_of_several_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failures of other tasks at the same time would be reprs of Python."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    outcome = run("log", "obstore+s3://bucket/r", "-o", "region=us-east-1")
    assert outcome.exit_code == 1
    assert outcome.stderr.endswith("or give --option allow_http=true.\n")


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    """With the same exit code."""
    outcome = run("log", tmp_path / "none", "--debug")
    assert outcome.exit_code == 1
    assert "Traceback" in outcome.stderr
    assert "RepositoryNotFoundError" in outcome.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("log",),
        ("paint", "{sample}"),
        ("log", "{sample}", "--loud"),
        ("log", "{sample}", "-n", "0"),
        ("log", "{sample}", "--option", "durability"),
        ("log", "{sample}", "--as-of", "yesterday"),
        ("init", "{sample}", "--spec-version", "3"),
        ("diff", "{sample}", "main"),
    ],
)
def test_wrong_usage_is_exit_code_2(sample: Sample, arguments: tuple[str, ...]) -> None:
    """With a hint on standard error, and nothing on standard output."""
    outcome = run(*(it.format(sample=sample.path) for it in arguments))
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert "Usage:" in outcome.stderr


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=true", True),
        ("a=3", 3),
        ("a=2.5", 2.5),
        ("a=null", None),
        ('a="3"', "3"),
        ("a=none", "none"),
        ("a=", ""),
        ("a=b=c", "b=c"),
        ("a=007", "007"),
    ],
)
def test_values_of_options_are_json_or_text(text: str, value: object) -> None:
    """Numbers and switches are parsed. All other values stay text."""
    assert parse_pair(text) == ("a", value)


@pytest.mark.parametrize("text", ["a", "=b", ""])
def test_an_option_needs_a_name_and_a_value(text: str) -> None:
    """Else it is refused by name."""
    with pytest.raises(typer.BadParameter, match="key=value"):
        parse_pair(text)


def test_backend_options_reach_the_backend(sample: Sample) -> None:
    """One that it knows is accepted, of the right type."""
    option = ("--option", "durability=none", "-o", "lock_timeout_seconds=5")
    assert run("log", sample.path, *option).exit_code == 0
    assert run("log", sample.path, "-o", "lock_timeout_seconds=soon").exit_code == 1


def test_times_have_a_zone() -> None:
    """UTC unless another is given."""
    assert parse_time("2026-01-31T12:00") == parse_time("2026-01-31T14:00+02:00")


def test_an_interrupt_ends_with_130() -> None:
    """Shells expect this exit code."""

    async def work() -> None:
        raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as ended:
        run_and_show(work, lambda _document, _console: None, as_json=False, debug=False)
    assert ended.value.exit_code == 130


def test_a_document_holds_json_only() -> None:
    """Anything else is a mistake of ours that no user should get as text."""

    async def work() -> object:
        return {"a": object()}

    with pytest.raises(TypeError, match="object"):
        run_and_show(work, lambda _document, _console: None, as_json=True, debug=False)
