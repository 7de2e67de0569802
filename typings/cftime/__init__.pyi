from typing import Any

import numpy as np
import numpy.typing as npt

class datetime:  # noqa: N801
    year: int

def num2date(
    times: npt.NDArray[Any], units: str, calendar: str
) -> np.ndarray[tuple[Any, ...], np.dtype[np.object_]]: ...
def date2num(dates: Any, units: str, calendar: str = ...) -> Any: ...
