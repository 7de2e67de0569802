"""A pytest plugin, ``-p tests.slow_disk``: waits for the disk take up to 50 ms longer."""

from __future__ import annotations

import os
import random
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_LONGEST_SECONDS: Final = 0.05
_sleep = time.sleep  # the tests watch for others that call it
# Hypothesis watches the module's own generator, and threads of a repository wait while it draws.
_random: Final = random.Random()


def _slow[**P](wait: Callable[P, None]) -> Callable[P, None]:
    def slow_wait(*arguments: P.args, **keywords: P.kwargs) -> None:
        _sleep(_random.uniform(0, _LONGEST_SECONDS))
        wait(*arguments, **keywords)

    return slow_wait


os.fsync = _slow(os.fsync)
os.fdatasync = _slow(os.fdatasync)
