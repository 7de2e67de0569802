"""The influences on a figure besides the code: the machine, its other load, and memory."""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Self

import numpy as np

__all__ = ["Meter", "busy_elsewhere", "describe", "find_memory"]

_LOOK_SECONDS: Final = 0.2
_STATUS: Final = Path("/proc/self/status")
_IO: Final = Path("/proc/self/io")
_QUARTER_BYTES: Final = 256 << 20
_PAGE_BYTES: Final = 4096
_PACKAGES: Final = ("icechunk", "zarr", "numpy", "obstore", "tensorstore", "aiobotocore", "uvloop")


def busy_elsewhere() -> float:
    """Return the share of the machine's processors that others use now, 0 to 1.

    Looks for a fifth of a second, in which this process does nothing. 0 where nobody can tell.
    """
    before = _ticks()
    time.sleep(_LOOK_SECONDS)
    after = _ticks()
    total = after[1] - before[1]
    return (after[0] - before[0]) / total if total else 0.0


def find_memory(quarters: int = 1) -> None:
    """Have the system find quarters of a gigabyte, as a contender may take, and give them back.

    Virtual machines return what is free to their host. Who is the first to take it again pays more
    than a millisecond for each megabyte, whatever it does with it. This is for what takes much at
    once: reading objects of a megabyte from S3 became slower by it.
    """
    memory = np.empty(quarters * _QUARTER_BYTES, np.uint8)
    # One byte of each page: until then the system has only promised it.
    memory[::_PAGE_BYTES] = 1


def _ticks() -> tuple[int, int]:
    """Return the ticks that the processors worked, and all of them."""
    try:
        line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    except OSError:
        return 0, 0
    # user, nice, system, idle, iowait, irq, softirq, steal: idle and waiting for disks is not work.
    fields = [int(field) for field in line.split()[1:9]]
    total = sum(fields)
    return total - fields[3] - fields[4], total


def describe() -> dict[str, str]:
    """Return the facts about the machine that matter when figures are compared."""
    model = ""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        model = platform.processor()
    return {
        "processor": f"{os.cpu_count()} x {model}",
        "system": platform.system() + " " + platform.release().partition("-")[0],
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
    }


def _version(name: str) -> str:
    """Return the version of a package, of which no run needs all."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


@dataclass(slots=True)
class Meter:
    """Measures what happens between ``with`` and its end: seconds, processor time, peak memory.

    The peak is that of the process. Measure it in a separate process.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_bytes: float = 0.0
    """How far the resident memory rose above where it was."""
    read_bytes: float = 0.0
    """Bytes read from files and sockets, whether they came from a disk or not."""
    finds_memory: bool = False
    """Whether to call `find_memory` first."""
    _resident: int = 0

    def __enter__(self) -> Self:
        """Begin."""
        gc.collect()
        if self.finds_memory:
            find_memory()
        with contextlib.suppress(OSError):
            # 5 sets the peak (VmHWM) back to what is resident now; without it, it would be that of
            # the imports.
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._resident = _number(_STATUS, "VmRSS")
        self.read_bytes = -_number(_IO, "rchar")
        # Subtracted now and added at the end, in an order that puts the clocks next to the work.
        self.cpu_seconds = -time.process_time()
        self.seconds = -time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self.seconds += time.perf_counter()
        self.cpu_seconds += time.process_time()
        self.peak_bytes = max(0, _number(_STATUS, "VmHWM") - self._resident) * 1024.0
        self.read_bytes += _number(_IO, "rchar")

    def figures(self) -> dict[str, float]:
        """Return the measured values by the name of the metric."""
        return {
            "seconds": self.seconds,
            "cpu seconds": self.cpu_seconds,
            "peak memory": self.peak_bytes,
            "bytes": self.read_bytes,
        }


def _number(path: Path, name: str) -> int:
    """Return a number that the system tells of this process; 0 where it tells none."""
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
    return 0
