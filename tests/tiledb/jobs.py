"""Random arrays for the tests: specifications, steps of writing, and queries, as plain JSON.

A specification names what `tests.tiledb.engine` can create. Steps are writes, consolidations,
deletions and so on, each at a time in milliseconds. Data comes from seeds, so that a job is small.
"""

from __future__ import annotations

import math
import random
from typing import Any, Final

import numpy as np

from tests.tiledb.engine import Raw, dtype_of

__all__ = ["dense_job", "feature_jobs", "labelled_job", "make_cells", "sparse_job"]

_INTEGERS: Final = (
    "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
)  # fmt: skip
_DIMENSIONS: Final = (*_INTEGERS, "datetime_day", "datetime_ns")
_COMPRESSORS: Final = ("gzip", "zstd", "lz4", "rle", "bzip2")
_REORDER: Final = ("byteshuffle", "bitshuffle")
_FIRST_ONLY: Final = ("double-delta", "delta", "float-scale", "positive-delta", "xor", "rle")

BASE: Final = 1_000_000_000_000
"""Times of writes begin here: in the past, because TileDB consolidates footers until now only."""
FUTURE: Final = 4_000_000_000_000
"""Those of groups and of arrays whose schema evolves: both are created by the clock."""

type Job = dict[str, Any]
type Version = tuple[int, ...]


def _kinds(dtype: str, version: Version) -> list[str]:
    """Return the filters that work on numbers of a type, likely ones several times."""
    is_float = dtype.startswith("float")
    found: list[str] = ["bit-width-reduction"] * 2
    if not is_float:
        found += ["positive-delta"]
    if dtype == "bool":
        return found
    if not is_float:
        found += ["double-delta"] * 2
        if version >= (2, 16):
            found += ["delta"] * 2
    if version >= (2, 12):
        found += ["xor"] * 2
    if version >= (2, 11) and is_float:
        found += ["float-scale"] * 3
    return found


def _options(rng: random.Random, name: str) -> Job:
    if name in ("gzip", "zstd"):
        return {"level": rng.choice((1, 5, 9))}
    if name == "float-scale":
        return {"scale": 0.25, "offset": 1.5, "byte_width": rng.choice((2, 4, 8))}
    if rng.random() < 0.5:
        return {}
    if name == "bit-width-reduction":
        return {"window": rng.choice((64, 256, 1000, 4096))}
    return {"positive_window": rng.choice((64, 1024))} if name == "positive-delta" else {}


def _chain(rng: random.Random, dtype: str, version: Version, *, numeric: bool = True) -> list[Any]:
    """Return a random filter pipeline for values of a type."""
    if rng.random() < 0.25:
        return []
    kinds = [*_COMPRESSORS, *_COMPRESSORS, *_REORDER, "md5", "sha256"]
    kinds += _kinds(dtype, version) if numeric else []
    found: list[Any] = []
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        name = rng.choice(kinds)
        # What some filters receive must be whole numbers of their type.
        if not found or name not in _FIRST_ONLY:
            found.append([name, _options(rng, name)])
    return found


def _attribute(rng: random.Random, number: int, version: Version, *, dense: bool) -> Job:
    dtypes = [*_INTEGERS, "float32", "float64", "datetime_sec"]
    if version >= (2, 10):
        dtypes += ["bool"]
    # TileDB itself crashes on dense text with statistics in all attributes but the first.
    text = ["ascii", "utf8", "char"] if not dense or number == 0 else ["utf8"]
    kind = rng.random()
    # Names become file names in old versions, which encoded some characters.
    attr: Job = {"name": f"a{number}" if version >= (2, 3) else f"attr {number}"}
    if version < (2, 4):
        attr["least"] = 1  # cells without values could not be written
    if kind < 0.55:
        attr |= {"dtype": rng.choice(dtypes)}
        attr["filters"] = _chain(rng, attr["dtype"], version)
        if rng.random() < 0.1 and attr["dtype"] != "bool":
            attr["ncells"] = rng.choice((2, 3))
    elif kind < 0.85:
        attr |= {"dtype": rng.choice(text), "var": True}
        attr["filters"] = _chain(rng, attr["dtype"], version, numeric=False)
        if version >= (2, 7) and attr["dtype"] != "char" and rng.random() < 0.3:
            rest = [it for it in attr["filters"][:1] if it[0] in ("gzip", "zstd", "lz4", "bzip2")]
            attr["filters"] = [[rng.choice(("dictionary", "rle")), {}], *rest]
    elif kind < 0.93:
        attr |= {"dtype": rng.choice(("int32", "float64", "uint16")), "var": True}
        attr["filters"] = _chain(rng, attr["dtype"], version, numeric=False)
    else:
        attr |= {"dtype": "char", "ncells": rng.choice((1, 3, 7))}
        attr["filters"] = _chain(rng, "char", version, numeric=False)
    if version >= (2, 2, 4) and rng.random() < 0.3:
        attr["nullable"] = True
    return attr


def _filters_everywhere(rng: random.Random, version: Version) -> Job:
    found: Job = {}
    if rng.random() < 0.5:
        options = [["zstd", {}]], [["double-delta", {}], ["bit-width-reduction", {}], ["zstd", {}]]
        found["offsets_filters"] = rng.choice(options)
    if version >= (2, 5) and rng.random() < 0.3:
        found["validity_filters"] = rng.choice(([["zstd", {}]], [["rle", {}]], []))
    return found


def _dense_dimension(rng: random.Random, number: int, dtype: str) -> Job:
    size = rng.randint(1, 14)
    tile = rng.randint(1, min(size, 6))
    low = rng.choice((0, 1, 5, 100))
    if dtype.startswith(("int", "datetime")) and rng.random() < 0.4:
        low = -rng.randint(1, 20)
    return {"name": f"d{number}", "dtype": dtype, "domain": [low, low + size - 1], "tile": tile}


def dense_job(seed: int, version: Version) -> Job:
    """Return a random dense array with up to four writes, and queries at several times."""
    rng = random.Random(f"dense/{seed}")
    dtype = rng.choice(_DIMENSIONS if version >= (2, 0) else _INTEGERS)
    dims = [_dense_dimension(rng, n, dtype) for n in range(rng.choice((1, 2, 2, 3)))]
    job: Job = {
        "sparse": False,
        "dims": dims,
        "attrs": [_attribute(rng, n, version, dense=True) for n in range(rng.choice((1, 1, 2, 3)))],
        "tile_order": rng.choice(("row", "row", "col")),
        "cell_order": rng.choice(("row", "row", "col")),
        **_filters_everywhere(rng, version),
    }
    evolves = _evolves(rng, version)
    base = FUTURE if evolves else BASE
    time = base + 10
    steps: list[Job] = []
    for _ in range(rng.choice((1, 1, 2, 3, 4))):
        step = {"op": "write", "time": time, "seed": rng.randrange(1 << 30)}
        steps.append({**step, "region": _region(rng, dims)})
        time += 10
    if version >= (2, 1) and rng.random() < 0.25 and len(steps) > 1:
        steps += _consolidation(rng, time)
    steps += _tidy(rng, version, time)
    if evolves:
        steps += _evolution(rng, job, version, time + 20)
    job["steps"] = steps
    whole = {"region": [dim["domain"] for dim in dims]}
    queries = [{**whole, **it} for it in _windows(rng, version, base, time)]
    job["queries"] = [*queries, {"region": _region(rng, dims), **_latest(version, base)}]
    return job


def _windows(rng: random.Random, version: Version, base: int, time: int) -> list[Job]:
    """Return the times of queries: the latest, and some earlier ones."""
    found = [_latest(version, base)]
    if version >= (2, 3):
        found.append({"end": rng.randrange(base + 5, time + 10)})
        start = rng.randrange(base + 5, time)
        found.append({"start": start, "end": rng.randrange(start, time + 10)})
    return found


def _evolves(rng: random.Random, version: Version) -> bool:
    return version >= (2, 5) and rng.random() < 0.2  # before, evolution takes no time


def _consolidation(rng: random.Random, time: int) -> list[Job]:
    found: list[Job] = [{"op": "consolidate", "time": time, "mode": "fragments"}]
    if rng.random() < 0.5:
        found.append({"op": "vacuum", "mode": "fragments"})
    return found


def _latest(version: Version, base: int = BASE) -> Job:
    """Return the end of a query that sees all; by default TileDB looks at the clock."""
    return {"end": base + 1_000_000} if version >= (2, 3) else {}


def _tidy(rng: random.Random, version: Version, time: int) -> list[Job]:
    """Return consolidations of commits and of footers."""
    found: list[Job] = []
    if version < (2, 9) or rng.random() < 0.7:
        return found
    for mode in ("commits", "fragment_meta"):
        if rng.random() < 0.6:
            found.append({"op": "consolidate", "mode": mode, "time": time})
            if rng.random() < 0.5:
                found.append({"op": "vacuum", "mode": mode})
    return found


def _evolution(rng: random.Random, job: Job, version: Version, time: int) -> list[Job]:
    added = _attribute(rng, 77, version, dense=not job["sparse"])
    added["filters"] = []
    if version < (2, 16):
        added.pop("nullable", None)
    step: Job = {"op": "evolve", "time": time, "add": [added]}
    if len(job["attrs"]) > 1 and rng.random() < 0.4:
        step["drop"] = [job["attrs"][0]["name"]]
    found = [step]
    if rng.random() < 0.7:
        later: Job = {"op": "write", "time": time + 10, "seed": rng.randrange(1 << 30)}
        if job["sparse"]:
            later["count"] = rng.choice((3, 20))
        else:
            later["region"] = _region(rng, job["dims"])
        found.append(later)
    return found


def _region(rng: random.Random, dims: list[Job]) -> list[list[int]]:
    found: list[list[int]] = []
    for dim in dims:
        low, high = dim["domain"]
        if rng.random() < 0.3:
            found.append([low, high])
        else:
            first = rng.randint(low, high)
            found.append([first, rng.randint(first, high)])
    return found


def _sparse_dimension(rng: random.Random, number: int, version: Version, dtype: str) -> Job:
    if dtype == "ascii":
        return {
            "name": f"d{number}",
            "dtype": "ascii",
            "domain": [None, None],
            "least": 1 if version < (2, 4) else 0,
            "filters": rng.choice(([], [["zstd", {}]], [["rle", {}]] if version >= (2, 7) else [])),
        }
    low = rng.choice((0, 1, -30)) if not dtype.startswith("u") else rng.choice((0, 3))
    size = rng.choice((20, 60, 90))
    dim: Job = {"name": f"d{number}", "dtype": dtype, "domain": [low, low + size]}
    dim["tile"] = rng.choice((5, 10, size))
    if version >= (2, 0) and rng.random() < 0.4:
        narrow = [["bit-width-reduction", {}], ["lz4", {}]]
        options = [[["zstd", {}]], [["double-delta", {}]], narrow]
        dim["filters"] = [["byteshuffle", {}]] if "float" in dtype else rng.choice(options)
    return dim


def sparse_job(seed: int, version: Version) -> Job:
    """Return a random sparse array with up to five writes, deletions and consolidations."""
    rng = random.Random(f"sparse/{seed}")
    rank = rng.choice((1, 2, 2, 3))
    numbers = ("int32", "int64", "uint16", "float64")
    if version >= (2, 0):
        kinds = [rng.choice((*numbers, "ascii", "datetime_ns")) for _ in range(rank)]
    else:
        kinds = [rng.choice(numbers)] * rank
    job: Job = {
        "sparse": True,
        "dups": version >= (2, 0) and rng.random() < 0.4,
        "capacity": rng.choice((2, 5, 20, 1000)),
        "dims": [_sparse_dimension(rng, n, version, kind) for n, kind in enumerate(kinds)],
        "attrs": [_attribute(rng, n, version, dense=False) for n in range(rng.choice((1, 2, 3)))],
        "tile_order": rng.choice(("row", "col")),
        "cell_order": rng.choice(("row", "row", "col")),
        **_filters_everywhere(rng, version),
    }
    if version >= (2, 3) and rng.random() < 0.2:
        job["cell_order"] = "hilbert"
    evolves = _evolves(rng, version)
    base = FUTURE if evolves else BASE
    steps, time = _sparse_steps(rng, job, version, base + 10)
    steps += _tidy(rng, version, time)
    if evolves:
        steps += _evolution(rng, job, version, time + 20)
    job["steps"] = steps
    job["queries"] = [{**it, **_order(job, version)} for it in _windows(rng, version, base, time)]
    return job


def _order(job: Job, version: Version) -> Job:
    """Return the order in which TileDB has to read a sparse array, if not any will do.

    TileDB 2.7 and 2.8 stored text in Hilbert order wrongly: short text after longer text (2.3 to
    2.6 and 2.9 put it first). Read in no order or in global order by 2.30, which merges fragments
    as if they were sorted, copies of a cell then come several times although the schema forbids
    duplicates, or the process crashes. The release that wrote them reads one row for each cell in
    every order, and 2.30 does in row-major and column-major order, for which it sorts.
    """
    is_text = any(dim["dtype"] == "ascii" for dim in job["dims"])
    is_wrong = (2, 7) <= version < (2, 9) and job["cell_order"] == "hilbert" and is_text
    return {"order": "row"} if is_wrong and not job["dups"] else {}


def _sparse_steps(
    rng: random.Random, job: Job, version: Version, time: int
) -> tuple[list[Job], int]:
    steps: list[Job] = []
    for _ in range(rng.choice((1, 2, 3, 5))):
        count = rng.choice((1, 7, 40, 150))
        steps.append({"op": "write", "time": time, "seed": rng.randrange(1 << 30), "count": count})
        time += 10
        condition = _condition(rng, job)
        if version >= (2, 12) and rng.random() < 0.3 and condition is not None:
            steps.append({"op": "delete", "time": time, "condition": condition})
            time += 10
        if version >= (2, 1) and rng.random() < 0.15:
            steps += _consolidation(rng, time)
    return steps, time


def _condition(rng: random.Random, job: Job, depth: int = 0) -> Any:
    if depth < 2 and rng.random() < 0.25:
        sides = [_condition(rng, job, depth + 1) for _ in range(2)]
        return None if None in sides else [rng.choice(("and", "or")), *sides]
    simple = [
        it
        for it in job["attrs"]
        if (it["dtype"] in ("int32", "int16", "uint8", "float64", "int64") and not it.get("var")
            and it.get("ncells", 1) == 1)
        or (it["dtype"] == "ascii" and it.get("var"))
    ]  # fmt: skip
    if not simple:
        return None
    attr = rng.choice(simple)
    operator = rng.choice(("<", "<=", ">", ">=", "==", "!="))
    if attr["dtype"] == "ascii":
        return [attr["name"], operator, rng.choice(("aa", "b", "ccc"))]
    return [attr["name"], operator, rng.choice((0, 3, 10, 40))]


def make_cells(job: Job, step: Job, attrs: list[Job]) -> dict[str, Raw]:
    """Return the cells of a write, from its seed."""
    rng = np.random.default_rng(step["seed"])
    found: dict[str, Raw] = {}
    if job["sparse"]:
        coords = _coordinates(rng, job, step["count"])
        found.update(coords)
        first = next(iter(coords.values()))
        count = len(first.values if first.offsets is None else first.offsets)
    else:
        count = math.prod(high - low + 1 for low, high in step["region"])
    for attr in attrs:
        found[attr["name"]] = _values(rng, attr, count)
    for label in job.get("labels", ()):
        values = np.cumsum(rng.integers(1, 5, count)).astype(dtype_of(label["dtype"]))
        found[label["name"]] = Raw(values)
    return found


def _coordinates(rng: np.random.Generator, job: Job, count: int) -> dict[str, Raw]:
    columns: list[list[Any]] = []
    for dim in job["dims"]:
        if dim["dtype"] == "ascii":
            least = dim.get("least", 0)
            words = ["".join(rng.choice(list("abc"), rng.integers(least, 4))) for _ in range(count)]
            columns.append(words)
            continue
        low, high = dim["domain"]
        if dim["dtype"] == "float64":
            columns.append((np.round(rng.uniform(low, high, count) * 2) / 2).tolist())
        else:
            columns.append(rng.integers(low, high, count, endpoint=True).tolist())
    rows = list(zip(*columns, strict=True))
    if not job["dups"]:
        rows = list(dict.fromkeys(rows))
    found: dict[str, Raw] = {}
    for dim, column in zip(job["dims"], zip(*rows, strict=True), strict=True):
        if dim["dtype"] == "ascii":
            found[dim["name"]] = _joined([it.encode() for it in column])
        else:
            found[dim["name"]] = Raw(np.array(column, dtype_of(dim["dtype"])))
    return found


def _joined(parts: list[bytes]) -> Raw:
    starts = np.cumsum([0, *map(len, parts)])[:-1].astype("<u8")
    data = b"".join(parts)
    return Raw(np.frombuffer(data or b"\0", "u1").copy()[: len(data)], starts)


def _values(rng: np.random.Generator, attr: Job, count: int) -> Raw:
    dtype = dtype_of(attr["dtype"])
    least = attr.get("least", 0)
    if attr.get("var"):
        if attr["dtype"] in ("ascii", "utf8", "char"):
            words = [bytes(rng.choice(list(b"abc"), rng.integers(least, 5))) for _ in range(count)]
            if rng.random() < 0.3:  # runs
                words = [words[n // 5] for n in range(count)]
            raw = _joined(words)
            raw.values = raw.values.view(dtype)
        else:
            lengths = rng.integers(least, 4, count)
            values = rng.integers(0, 100, int(lengths.sum())).astype(dtype)
            starts = (np.cumsum(lengths) - lengths) * dtype.itemsize
            raw = Raw(values, starts.astype("<u8"))
    else:
        raw = Raw(_numbers(rng, attr, count * attr.get("ncells", 1), dtype))
    if attr.get("nullable"):
        raw.valid = (rng.random(count) < rng.choice((0.0, 0.5, 0.9, 1.0))).astype("u1")
    return raw


def _numbers(rng: np.random.Generator, attr: Job, count: int, dtype: np.dtype[Any]) -> Any:
    names = [it[0] for it in attr.get("filters", ())]
    if attr["dtype"] == "bool":
        return rng.integers(0, 2, count).astype("u1")
    if "positive-delta" in names:
        most = min(100, np.iinfo(dtype).max)
        return np.sort(rng.integers(0, most, count)).astype(dtype)
    if dtype.kind == "f":
        if "float-scale" in names:
            return (np.round(rng.uniform(-50, 50, count)) * 0.25 + 1.5).astype(dtype)
        values = np.round(rng.normal(10, 20, count), 1).astype(dtype)
        if rng.random() < 0.2:
            values[rng.random(count) < 0.1] = np.nan
        return values
    style = rng.random()
    if style < 0.3:
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, count, dtype, endpoint=True)
    if style < 0.6:
        return np.cumsum(rng.integers(0, 3, count)).astype(dtype)
    return rng.integers(0, 50, count).astype(dtype)


def feature_jobs(version: Version) -> list[Job]:
    """Return arrays with features that random ones lack, as far as a version has them."""
    return [
        _every_filter(version),
        *([_with_footers()] if version >= (2, 9) else []),
        *([_with_enumerations(), _with_current_domain()] if version >= (2, 27) else []),
        *([_with_history()] if version >= (2, 27) else []),
    ]


def _every_filter(version: Version) -> Job:
    """Return an array with an attribute for each filter, in tiles of several chunks."""
    chains: list[tuple[str, list[Any]]] = [
        ("int32", []),
        ("int32", [["gzip", {"level": 6}]]),
        ("float64", [["zstd", {"level": 3}]]),
        ("int64", [["lz4", {}]]),
        ("uint8", [["rle", {}]]),
        ("int16", [["bzip2", {"level": 1}]]),
        ("int32", [["double-delta", {}]]),
        ("uint32", [["bit-width-reduction", {}], ["zstd", {}]]),
        ("float32", [["bitshuffle", {}], ["lz4", {}]]),
        ("float64", [["byteshuffle", {}], ["zstd", {}]]),
        ("int64", [["positive-delta", {}], ["bzip2", {}]]),
        ("int32", [["md5", {}], ["zstd", {}], ["sha256", {}]]),
    ]
    if version >= (2, 11):
        chains.append(("float64", [["float-scale", _SCALE], ["zstd", {}]]))
    if version >= (2, 12):
        chains.append(("int32", [["xor", {}], ["zstd", {}]]))
    if version >= (2, 16):
        chains.append(("int64", [["delta", {}], ["zstd", {}]]))
    attrs = [
        {"name": f"a{n}", "dtype": dtype, "filters": chain, "chunk": 512}
        for n, (dtype, chain) in enumerate(chains)
    ]
    dims = [{"name": "x", "dtype": "int32", "domain": [0, 999], "tile": 500}]
    region = {"region": [[0, 999]]}
    step = {"op": "write", "time": BASE + 10, "seed": 5, **region}
    return {
        "sparse": False,
        "dims": dims,
        "attrs": attrs,
        "steps": [step],
        "queries": [{**region, **_latest(version)}],
    }


_SCALE: Final = {"scale": 0.25, "offset": 1.5, "byte_width": 4}


def _with_footers() -> Job:
    """Return an array whose footers were consolidated before its last write."""
    steps: list[Job] = [
        {"op": "write", "time": BASE + number, "seed": number, "region": [[number, number + 3]]}
        for number in range(5)
    ]
    tidy = {"op": "consolidate", "mode": "fragment_meta", "time": BASE + 3}
    return {
        "sparse": False,
        "dims": [{"name": "x", "dtype": "int32", "domain": [0, 9], "tile": 2}],
        "attrs": [{"name": "a", "dtype": "int16", "nullable": True}],
        "steps": [*steps[:4], tidy, steps[4]],
        "queries": [{"region": [[0, 9]], "end": BASE + end} for end in (1000, 3, 1)],
    }


def _with_enumerations() -> Job:
    attrs = [
        {"name": "kind", "dtype": "uint8", "enumeration": "kinds", "nullable": True},
        {"name": "size", "dtype": "int32", "enumeration": "sizes"},
    ]
    return {
        "sparse": True,
        "dups": True,
        "capacity": 10,
        "dims": [{"name": "x", "dtype": "int64", "domain": [0, 1000], "tile": 100}],
        "enumerations": {
            "kinds": {"dtype": "utf8", "values": [f"kind {n}" for n in range(200)]},
            "sizes": {"dtype": "int64", "values": list(range(100, 200)), "ordered": True},
        },
        "attrs": attrs,
        "steps": [{"op": "write", "time": BASE + 10, "seed": 8, "count": 25}],
        "queries": [{"end": BASE + 1_000_000}],
    }


def _with_current_domain() -> Job:
    dims = [
        {"name": "x", "dtype": "int64", "domain": [0, 2**62], "tile": 4},
        {"name": "y", "dtype": "int64", "domain": [0, 2**62], "tile": 3},
    ]
    region = [[2, 9], [1, 5]]
    return {
        "sparse": False,
        "dims": dims,
        "attrs": [{"name": "a", "dtype": "float32", "filters": [["zstd", {}]]}],
        "current_domain": [[0, 19], [0, 9]],
        "steps": [{"op": "write", "time": BASE + 10, "seed": 9, "region": region}],
        "queries": [{"region": [[0, 19], [0, 9]], "end": BASE + 1_000_000}],
    }


def labelled_job() -> Job:
    """Return an array with a label, which holds rising moments."""
    dims = [{"name": "x", "dtype": "int32", "domain": [1, 12], "tile": 5}]
    step = {"op": "write", "time": BASE + 10, "seed": 3, "region": [[1, 12]]}
    return {
        "sparse": False,
        "dims": dims,
        "attrs": [{"name": "a", "dtype": "int16"}],
        "labels": [{"dim": 0, "name": "when", "order": 1, "dtype": "datetime_sec"}],
        "steps": [step],
        "queries": [],
    }


def _with_history() -> Job:
    """Return an array whose cells were deleted, consolidated and written again."""
    steps: list[Job] = []
    for number in range(5):
        time = BASE + 10 * number
        steps.append({"op": "write", "time": time, "seed": number, "count": 30})
        condition = ["a", "in", [1, 2, 3]] if number == 2 else ["a", "<", 10 * number]
        steps.append({"op": "delete", "time": time + 5, "condition": condition})
        if number == 3:
            steps += [
                {"op": "consolidate", "time": time + 6, "mode": "fragments"},
                {"op": "consolidate", "time": time + 7, "mode": "commits"},
                {"op": "vacuum", "mode": "fragments"},
                {"op": "vacuum", "mode": "commits"},
            ]
    return {
        "sparse": True,
        "dups": False,
        "capacity": 6,
        "dims": [{"name": "x", "dtype": "int32", "domain": [0, 40], "tile": 10}],
        "attrs": [{"name": "a", "dtype": "int64"}],
        "steps": steps,
        "queries": [
            {"end": BASE + 1000},
            *({"end": BASE + end} for end in (0, 4, 5, 15, 24, 33, 35, 36, 44)),
            {"start": BASE + 11, "end": BASE + 41},
        ],
    }
