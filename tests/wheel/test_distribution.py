"""The metadata that a package index shows, and a source distribution that works."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tarfile
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source distribution, and unpack it elsewhere."""
    directory = tmp_path_factory.mktemp("sdist")
    _run(ROOT, "-m", "hatchling", "build", "-t", "sdist", "-d", str(directory))
    (archive,) = directory.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(directory, filter="data")
    return directory / archive.name.removesuffix(".tar.gz")


def test_the_readme_has_no_relative_links() -> None:
    """They lead nowhere on an index; the words of those that were there stay."""
    metadata = importlib.metadata.metadata("icechunk-async")
    text = metadata.json["description"]
    assert isinstance(text, str)
    assert text.startswith("# icechunk-async")
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert targets
    assert [it for it in targets if not it.startswith("https://")] == []
    assert "the tests on each" in text
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_the_metadata_are_complete_and_claim_what_is_tested() -> None:
    """Each Python that is claimed has an environment of tests, and the other way round."""
    metadata = importlib.metadata.metadata("icechunk-async")
    assert metadata["Author"] == "icechunk-async maintainers"
    assert metadata["License-Expression"] == "Apache-2.0"
    claimed = re.findall(r"Python :: 3\.(\d+)", "\n".join(metadata.get_all("Classifier") or []))
    tox = ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini", encoding="utf-8")
    tested = re.findall(r"\bpy3(\d+)(?=,|$)", tox["tox"]["env_list"])
    assert sorted(claimed) == sorted(tested)
    assert metadata["Requires-Python"] == f">=3.{min(tested, key=int)}"


def test_the_source_distribution_has_what_is_tested_and_how(unpacked: Path) -> None:
    """Every module of the tests, what they read, and the list of checks."""
    for below in ("tests", "docs", "src", "backends", "benchmarks", "tools"):
        here, there = (
            {str(path.relative_to(root)) for path in (root / below).rglob("*.*") if path.is_file()}
            for root in (ROOT, unpacked)
        )
        assert {it for it in here if "__pycache__" not in it and "node_modules" not in it} == there
    for name in ("tox.ini", "toxfile.py", "dev", "pyproject.toml", "LICENSE", "CONTRIBUTING.md"):
        assert (unpacked / name).exists()


def test_tests_of_the_source_distribution_run(unpacked: Path) -> None:
    """Some of them, which need no extra, against the wheel that is installed."""
    some = [
        "tests/unit/test_opening.py",
        "tests/unit/format/test_ids.py",
        "tests/unit/test_refs.py",
    ]
    _run(unpacked, "-m", "pytest", "-q", "-p", "no:cacheprovider", *some)


def test_a_wheel_is_built_from_the_source_distribution(unpacked: Path, tmp_path: Path) -> None:
    """Without the version control that the tree came from."""
    _run(unpacked, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path))
    assert [it.name for it in tmp_path.iterdir()] == [f"{_tagged(unpacked)}-py3-none-any.whl"]


def _tagged(unpacked: Path) -> str:
    return unpacked.name.replace("-async-", "_async-")


def _run(directory: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
