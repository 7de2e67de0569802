"""Environments of tox are named where contributors and CI look for them."""

from __future__ import annotations

import re
import tomllib
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


def minima(extra: str, extras: dict[str, list[str]]) -> dict[str, tuple[int, ...]]:
    """Return the lowest version of each package that an extra asks for."""
    found: dict[str, tuple[int, ...]] = {}
    for requirement in extras[extra]:
        ours = re.fullmatch(r"icechunk-async\[(.+)\]", requirement)
        if ours is not None:
            for other in ours[1].split(","):
                for name, version in minima(other, extras).items():
                    found[name] = max(found.get(name, version), version)
            continue
        match = re.match(r"([a-z0-9-]+)(?:\[.*\])?>=([0-9.]+)", requirement)
        assert match, f"{extra}: {requirement} names no lowest version"
        version = tuple(int(part) for part in match[2].split("."))
        found[match[1]] = max(found.get(match[1], version), version)
    return found


def test_the_lowest_versions_of_every_extra_are_tried() -> None:
    """An extra is in an environment in which no other extra asks for more than it does."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    tox = ConfigParser(interpolation=None)
    tox.read(REPOSITORY / "tox.ini", encoding="utf-8")
    tried: set[str] = set()
    for name in tox:
        if not name.startswith("testenv:lowest"):
            continue
        together = re.findall(r"--extra (\w+)", tox[name]["set_env"])
        assert set(together) <= set(extras), name
        installed: dict[str, tuple[int, ...]] = {}
        for extra in together:
            for package, version in minima(extra, extras).items():
                installed[package] = max(installed.get(package, version), version)
        tried |= {it for it in together if minima(it, extras).items() <= installed.items()}
    # `all` is made of the others, and `local` is empty.
    assert tried == set(extras) - {"all", "local"}
