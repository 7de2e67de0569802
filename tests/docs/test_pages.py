"""Every command and code block that a reader can copy runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.docs.run_page import REPOSITORY, blocks
from tests.spark.java import java_home

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGES = sorted(
    page
    for page in [
        *REPOSITORY.glob("*.md"),
        *(REPOSITORY / "docs").rglob("*.md"),
    ]
    if blocks(page)
)
RUNNER = Path(__file__).with_name("run_page.py")
COMMANDS = [
    page
    for page in PAGES
    if any(
        language == "sh" and re.search(r"^icechunk-async ", text, re.MULTILINE)
        for _, language, text in blocks(page)
    )
]


# A page shows what an installation as it comes does. Here its jobs are small: two partitions after
# a shuffle instead of 200, and a JVM that does not optimize what runs once.
SPARK_DEFAULTS = """
spark.driver.extraJavaOptions -XX:TieredStopAtLevel=1 -XX:+UseSerialGC
spark.sql.adaptive.enabled false
spark.sql.codegen.wholeStage false
spark.sql.shuffle.partitions 2
"""


def _for_spark(directory: Path) -> dict[str, str]:
    """Return the variables that Spark needs here."""
    settings = directory / "conf" / "spark-defaults.conf"
    settings.parent.mkdir()
    settings.write_text(SPARK_DEFAULTS, encoding="utf-8")
    found = {
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_CONF_DIR": str(settings.parent),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    home = java_home(directory / "java")
    return found if home is None else {**found, "JAVA_HOME": home}


class Runner:
    """A process that runs pages, with arguments and variables that other processes lack."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self._arguments = arguments
        self._environment = environment
        self._process: subprocess.Popen[str] | None = None

    def run(self, page: Path, directory: Path) -> tuple[int, str]:
        """Return the exit code and the output of a page that runs in a directory."""
        output = directory / "output.txt"
        place = directory / "page"
        place.mkdir()
        request = {"page": str(page), "directory": str(place), "output": str(output)}
        process = self._process or self._start()
        self._process = None  # unless it answers
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(json.dumps(request), file=process.stdin, flush=True)
            answer = process.stdout.readline()
        except BaseException:
            _end(process)
            raise
        if answer:
            self._process = process
        else:
            _end(process)
        return int(answer or -1), output.read_text(encoding="utf-8", errors="replace")

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(RUNNER), *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env={**_environment(), **self._environment},
        )

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            _end(self._process)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    with process:
        pass


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONWARNINGS": "error",
        "PYTHONWARNDEFAULTENCODING": "",
        "COLUMNS": "100",
        "OPENBLAS_NUM_THREADS": "1",  # forks are made before there are threads
    }


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    """Run pages in forks."""
    made = Runner()
    yield made
    made.close()


@pytest.fixture(scope="module")
def runner_for_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Run pages in one process, and thereby in one JVM: starting that takes longer than a page."""
    made = Runner("--here", **_for_spark(tmp_path_factory.mktemp("spark")))
    yield made
    made.close()


def _of(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=lambda it: str(it.relative_to(REPOSITORY)))


@_of([page for page in PAGES if "spark" not in page.name])
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, runner: Runner) -> None:
    """In order, in an empty directory, without a warning."""
    code, output = runner.run(page, tmp_path)
    assert code == 0, output


@_of([page for page in PAGES if "spark" in page.name])
def test_the_blocks_of_a_page_about_spark_run(
    page: Path, tmp_path: Path, runner_for_spark: Runner
) -> None:
    """In order, in an empty directory, without a warning, with its own context."""
    code, output = runner_for_spark.run(page, tmp_path)
    assert code == 0, output


def without_blocks(page: Path) -> str:
    """Return the text of a page; code may look like a link."""
    return re.sub(
        r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )


def test_links_between_pages_lead_somewhere() -> None:
    """Relative links of README, CONTRIBUTING, the documentation and the results of benchmarks."""
    pages = [
        *REPOSITORY.glob("*.md"),
        *(REPOSITORY / "docs").rglob("*.md"),
        *(REPOSITORY / "benchmarks").rglob("*.md"),
    ]
    broken = [
        f"{page.relative_to(REPOSITORY)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#]+)", without_blocks(page))
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []


@pytest.mark.parametrize("page", COMMANDS, ids=lambda page: page.stem)
def test_a_page_with_commands_names_the_extra_that_brings_the_command(page: Path) -> None:
    """A plain installation does without what the command stands on."""
    before, *_ = re.split(
        r"^ *icechunk-async ", page.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert re.search(r"icechunk-async\[(\w+,)*cli(,\w+)*\]|the extra `cli`", before)
