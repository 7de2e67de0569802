"""Commands take URLs that name a ref and a path as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.cli.conftest import run

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Sample


def test_a_url_names_the_ref_and_the_path(sample: Sample) -> None:
    """As the arguments do."""
    for rest, ref in (
        ("@tag.v1", "v1"),
        (f"@{sample.v1}", "v1"),
        ("@branch.dev", "dev"),
        ("", "main"),
    ):
        url = f"{sample.path}/|icechunk:{rest}"
        named = run("log", url, "--json").json
        assert named["snapshots"] == run("log", sample.path, ref, "--json").json["snapshots"]
    below = run("ls", f"{sample.path}/|icechunk:@tag.v1/deep", "--json").json
    assert below == run("ls", sample.path, "/deep", "--ref", "v1", "--json").json
    verified = run("verify", f"{sample.path}/|icechunk:@tag.v1", "--json").json
    assert verified == run("verify", sample.path, "--ref", "v1", "--json").json


@pytest.mark.parametrize(
    ("rest", "arguments", "message"),
    [
        ("@tag.v1", ("log", "dev"), "The URL names a ref (v1), and the command line another"),
        ("@tag.v1", ("branch", "list"), "The URL names a ref (v1), and this command takes none"),
        ("deep", ("log",), "The URL names a path (/deep), and this command takes none"),
        ("@v1", ("log",), "whose kind is not clear"),
    ],
)
def test_what_cannot_be_named_is_refused(
    sample: Sample, rest: str, arguments: tuple[str, ...], message: str
) -> None:
    """In one sentence."""
    url = f"{sample.path}/|icechunk:{rest}"
    words = [it for it in arguments if it != "dev"]
    done = run(*words, url, "dev") if "dev" in arguments else run(*words, url)
    assert done.exit_code in {1, 2}
    assert message in " ".join(done.stderr.split())
