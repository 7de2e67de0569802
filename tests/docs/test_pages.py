"""Every command and code block that a reader can copy runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.run_page import REPOSITORY, blocks
from tests.spark.java import java_home

PAGES = sorted(
    page
    for page in [
        *REPOSITORY.glob("*.md"),
        *(REPOSITORY / "docs").rglob("*.md"),
    ]
    if blocks(page)
)
RUNNER = Path(__file__).with_name("run_page.py")


# A page shows what an installation as it comes does. Here its jobs are small: two partitions after
# a shuffle instead of 200, and a JVM that does not optimize what runs once.
SPARK_DEFAULTS = """
spark.driver.extraJavaOptions -XX:TieredStopAtLevel=1 -XX:+UseSerialGC
spark.sql.adaptive.enabled false
spark.sql.codegen.wholeStage false
spark.sql.shuffle.partitions 2
"""


def _for_spark(page: Path, directory: Path) -> dict[str, str]:
    """Return the variables that Spark needs here, for the pages that are about it."""
    if "spark" not in page.name:
        return {}
    settings = directory / "spark-conf" / "spark-defaults.conf"
    settings.parent.mkdir()
    settings.write_text(SPARK_DEFAULTS, encoding="utf-8")
    found = {
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_CONF_DIR": str(settings.parent),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    home = java_home(directory / "java")
    return found if home is None else {**found, "JAVA_HOME": home}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    """In order, in an empty directory, without a warning."""
    done = subprocess.run(
        [sys.executable, str(RUNNER), str(page)],
        cwd=tmp_path,
        env={
            **os.environ,
            **_for_spark(page, tmp_path),
            "PYTHONWARNINGS": "error",
            "PYTHONWARNDEFAULTENCODING": "",
            "COLUMNS": "100",
            "OPENBLAS_NUM_THREADS": "1",  # a page's process forks before there are threads
        },
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


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
