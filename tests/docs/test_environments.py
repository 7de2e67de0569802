"""Environments of tox are named where contributors and CI look for them."""

from __future__ import annotations

import re
from configparser import ConfigParser

from tests.docs.run_page import REPOSITORY


def environments() -> tuple[set[str], set[str]]:
    """Return the environments that run by default, and the others."""
    tox = ConfigParser(interpolation=None)
    tox.read(REPOSITORY / "tox.ini", encoding="utf-8")
    default = set(re.split(r",\s*", tox["tox"]["env_list"]))
    named = {name.removeprefix("testenv:") for name in tox if name.startswith("testenv:")}
    return default, named - default


def test_contributing_names_the_environments_that_do_not_run_by_default() -> None:
    """Others are found only in a list of all."""
    page = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^Some are not run by default.*?\n\n", page, re.MULTILINE | re.DOTALL)
    _, others = environments()
    assert set(re.findall(r"`(\S+)`", listed)) == others


def test_the_workflow_runs_environments_of_the_default_run() -> None:
    """One that is renamed or split is renamed or split there, too."""
    path = REPOSITORY / ".github" / "workflows" / "checks.yml"
    (listed,) = re.findall(
        r"^ +environment: \[(.*)\]$", path.read_text(encoding="utf-8"), re.MULTILINE
    )
    default, _ = environments()
    assert set(listed.split(", ")) <= default
