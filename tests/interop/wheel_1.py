"""An environment with the last official wheel that knew only spec 1; it needs Python 3.11."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

WHEEL = "icechunk==1.1.21"
VARIABLE = "ICECHUNK_1_PYTHON"
"""May name the Python of an environment that has the wheel."""


def environment(request: pytest.FixtureRequest, factory: pytest.TempPathFactory) -> str:
    """Return the Python of an environment with the wheel, made once and kept."""
    cache = getattr(request.config, "cache", None)
    place = factory.mktemp("wheel-1") if cache is None else cache.mkdir("icechunk-1.1.21")
    python = Path(place) / "bin" / "python"
    if _runs(python, "import icechunk, numpy"):
        return str(python)
    base: Path | None = next(
        (it for it in _interpreters() if _runs(it, "import venv, ensurepip")), None
    )
    if base is None:
        pytest.skip(
            f"NOT TESTED: compatibility with {WHEEL}. It needs Python 3.11, and no python3.11 on "
            f"PATH runs. Install one, or set {VARIABLE} to a Python that has the wheel."
        )
    subprocess.run([str(base), "-m", "venv", "--clear", str(place)], check=True)
    # Of the modules it brings few are used.
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", WHEEL]
    done = subprocess.run(install, check=False, capture_output=True, encoding="utf-8")
    if done.returncode:
        pytest.skip(
            f"NOT TESTED: compatibility with {WHEEL}. It cannot be installed: "
            f"{done.stderr.strip()[-300:]}. Set {VARIABLE} to a Python that has it."
        )
    return str(python)


def _interpreters() -> list[Path]:
    """Return every python3.11 on the path; some are shims that do not run."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    return [it for folder in folders if (it := Path(folder) / "python3.11").exists()]


def _runs(python: Path, code: str) -> bool:
    if not python.exists():
        return False
    check = f"import sys; {code}; assert sys.version_info[:2] == (3, 11)"
    done = subprocess.run([python, "-c", check], check=False, capture_output=True)
    return done.returncode == 0
