"""The C interface of TileDB's own library, of any version, by ctypes: the oracle of the tests.

Every wheel of TileDB-Py carries the library, and its C interface has hardly changed from version
1.7 to 2.30, so one program can let each version write and read arrays. Values go in and come out as
plain buffers, which is what has to be compared.
"""

from __future__ import annotations

import ctypes as c
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

__all__ = ["CODES", "FILTERS", "Engine", "EngineError", "Raw"]

CODES: Final = {
    "int32": 0, "int64": 1, "float32": 2, "float64": 3, "char": 4, "int8": 5, "uint8": 6,
    "int16": 7, "uint16": 8, "uint32": 9, "uint64": 10, "ascii": 11, "utf8": 12, "utf16": 13,
    "utf32": 14, "ucs2": 15, "ucs4": 16, "datetime_year": 18, "datetime_month": 19,
    "datetime_week": 20, "datetime_day": 21, "datetime_hr": 22, "datetime_min": 23,
    "datetime_sec": 24, "datetime_ms": 25, "datetime_us": 26, "datetime_ns": 27,
    "datetime_ps": 28, "time_hr": 31, "time_min": 32, "time_sec": 33, "time_ms": 34, "time_us": 35,
    "time_ns": 36, "blob": 40, "bool": 41, "wkb": 42, "wkt": 43,
}  # fmt: skip
DTYPES: Final = {
    "int32": "<i4", "int64": "<i8", "float32": "<f4", "float64": "<f8", "char": "i1", "int8": "i1",
    "uint8": "u1", "int16": "<i2", "uint16": "<u2", "uint32": "<u4", "uint64": "<u8",
    "ascii": "u1", "utf8": "u1", "utf16": "<u2", "utf32": "<u4", "ucs2": "<u2", "ucs4": "<u4",
    "blob": "u1", "bool": "u1", "wkb": "u1", "wkt": "u1",
}  # fmt: skip
FILTERS: Final = {
    "gzip": 1, "zstd": 2, "lz4": 3, "rle": 4, "bzip2": 5, "double-delta": 6,
    "bit-width-reduction": 7, "bitshuffle": 8, "byteshuffle": 9, "positive-delta": 10, "md5": 12,
    "sha256": 13, "dictionary": 14, "float-scale": 15, "xor": 16, "webp": 18, "delta": 19,
}  # fmt: skip
_OPTIONS: Final = {
    "level": (0, c.c_int32), "window": (1, c.c_uint32), "positive_window": (2, c.c_uint32),
    "byte_width": (3, c.c_uint64), "scale": (4, c.c_double), "offset": (5, c.c_double),
    "quality": (6, c.c_float), "format": (7, c.c_uint8), "lossless": (8, c.c_uint8),
    "reinterpret": (9, c.c_uint8),
}  # fmt: skip
VAR: Final = 0xFFFFFFFF
_READ, _WRITE, _DELETE = 0, 1, 2
_ORDERS: Final = {"row": 0, "col": 1, "global": 2, "unordered": 3, "hilbert": 4}
_OPERATORS: Final = {"<": 0, "<=": 1, ">": 2, ">=": 3, "==": 4, "!=": 5, "in": 6, "not in": 7}
_ROOM: Final = 1 << 22


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the NumPy type of stored values of a type of TileDB."""
    return np.dtype(DTYPES.get(name, "<i8"))


class EngineError(Exception):
    """The library refused a call."""


@dataclass
class Raw:
    """Cells of one field as the library hands them over."""

    values: npt.NDArray[Any]
    offsets: npt.NDArray[np.uint64] | None = None
    """In bytes; one for each cell."""
    valid: npt.NDArray[np.uint8] | None = None


@dataclass
class _Kept:
    """Objects that must live as long as a query."""

    things: list[Any] = field(default_factory=list)


class Engine:
    """One version of TileDB's library."""

    def __init__(self, path: str, config: Mapping[str, str] | None = None) -> None:
        """Load the library from a file."""
        self._lib = c.CDLL(path)
        version = [c.c_int32() for _ in range(3)]
        self._lib.tiledb_version(*map(c.byref, version))
        self.version = tuple(it.value for it in version)
        self._ctx: Any = None
        base = {"sm.num_tbb_threads": "1"} if self.version < (2, 1) else {}
        if self.version >= (2, 5):
            base |= {"sm.compute_concurrency_level": "2", "sm.io_concurrency_level": "2"}
        self._ctx = self._new_ctx({**base, **(config or {})})

    def _new_ctx(self, settings: Mapping[str, str]) -> Any:
        ctx = c.c_void_p()
        self._lib.tiledb_ctx_alloc(self._config(settings), c.byref(ctx))
        return ctx

    def _config(self, settings: Mapping[str, str]) -> Any:
        config, error = c.c_void_p(), c.c_void_p()
        self._lib.tiledb_config_alloc(c.byref(config), c.byref(error))
        for key, value in settings.items():
            status = self._lib.tiledb_config_set(
                config, key.encode(), value.encode(), c.byref(error)
            )
            if status:
                raise EngineError(f"config {key}={value}")
        return config

    def has(self, name: str) -> bool:
        """Return whether the library has a function."""
        return hasattr(self._lib, f"tiledb_{name}")

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function with the context before its arguments; raise an error if it fails."""
        if getattr(self._lib, f"tiledb_{name}")(self._ctx, *arguments) == 0:
            return
        error, text = c.c_void_p(), c.c_char_p()
        self._lib.tiledb_ctx_get_last_error(self._ctx, c.byref(error))
        self._lib.tiledb_error_message(error, c.byref(text))
        raise EngineError(f"{name}: {(text.value or b'').decode()}")

    def _new(self, name: str, *arguments: Any) -> Any:
        made = c.c_void_p()
        self.call(name, *arguments, c.byref(made))
        return made

    def filters(self, chain: Sequence[Any], chunk: int | None = None) -> Any:
        """Return a filter list; ``chain`` holds pairs of a name and options."""
        made = self._new("filter_list_alloc")
        for name, options in chain:
            it = self._new("filter_alloc", FILTERS[name])
            for key, value in options.items():
                number, kind = _OPTIONS[key]
                plain = CODES[value] if key == "reinterpret" else value
                held: Any = kind(plain)
                self.call("filter_set_option", it, number, c.byref(held))
            self.call("filter_list_add_filter", made, it)
        if chunk is not None:
            self.call("filter_list_set_max_chunk_size", made, c.c_uint32(chunk))
        return made

    def create(self, uri: str, spec: Mapping[str, Any]) -> None:
        """Create an array; see `jobs` for what a specification looks like."""
        schema = self._new("array_schema_alloc", 1 if spec["sparse"] else 0)
        domain = self._new("domain_alloc")
        for dim in spec["dims"]:
            self.call("domain_add_dimension", domain, self._dimension(dim))
        self.call("array_schema_set_domain", schema, domain)
        for name, enumeration in spec.get("enumerations", {}).items():
            self.call("array_schema_add_enumeration", schema, self._enumeration(name, enumeration))
        for attr in spec["attrs"]:
            self.call("array_schema_add_attribute", schema, self._attribute(attr))
        self.call("array_schema_set_tile_order", schema, _ORDERS[spec.get("tile_order", "row")])
        self.call("array_schema_set_cell_order", schema, _ORDERS[spec.get("cell_order", "row")])
        if "capacity" in spec:
            self.call("array_schema_set_capacity", schema, c.c_uint64(spec["capacity"]))
        if spec.get("dups"):
            self.call("array_schema_set_allows_dups", schema, 1)
        for kind in ("coords", "offsets", "validity"):
            if f"{kind}_filters" in spec:
                made = self.filters(spec[f"{kind}_filters"])
                self.call(f"array_schema_set_{kind}_filter_list", schema, made)
        if "current_domain" in spec:
            self._set_current_domain(schema, domain, spec)
        for label in spec.get("labels", ()):
            self.call(
                "array_schema_add_dimension_label", schema, c.c_uint32(label["dim"]),
                label["name"].encode(), label["order"], CODES[label["dtype"]],
            )  # fmt: skip
        self.call("array_schema_check", schema)
        self.call("array_create", uri.encode(), schema)

    def _dimension(self, dim: Mapping[str, Any]) -> Any:
        if dim["dtype"] == "ascii":
            bounds = extent = None
        else:
            dtype = dtype_of(dim["dtype"])
            bounds = _pointer(np.array(dim["domain"], dtype))
            extent = None if dim.get("tile") is None else _pointer(np.array([dim["tile"]], dtype))
        made = self._new(
            "dimension_alloc", dim["name"].encode(), CODES[dim["dtype"]], bounds, extent
        )
        if dim.get("filters"):
            self.call("dimension_set_filter_list", made, self.filters(dim["filters"]))
        return made

    def _attribute(self, attr: Mapping[str, Any]) -> Any:
        made = self._new("attribute_alloc", attr["name"].encode(), CODES[attr["dtype"]])
        count = VAR if attr.get("var") else attr.get("ncells", 1)
        self.call("attribute_set_cell_val_num", made, c.c_uint32(count))
        if attr.get("filters"):
            chain = self.filters(attr["filters"], attr.get("chunk"))
            self.call("attribute_set_filter_list", made, chain)
        if attr.get("nullable"):
            self.call("attribute_set_nullable", made, c.c_uint8(1))
        if "fill" in attr:
            data = np.array(attr["fill"], dtype_of(attr["dtype"]))
            arguments = made, _pointer(data), c.c_uint64(data.nbytes)
            if attr.get("nullable"):
                valid = c.c_uint8(attr.get("fill_valid", 0))
                self.call("attribute_set_fill_value_nullable", *arguments, valid)
            else:
                self.call("attribute_set_fill_value", *arguments)
        if "enumeration" in attr:
            self.call("attribute_set_enumeration_name", made, attr["enumeration"].encode())
        return made

    def _enumeration(self, name: str, it: Mapping[str, Any]) -> Any:
        ordered = 1 if it.get("ordered") else 0
        if it["dtype"] in ("ascii", "utf8"):
            parts = [value.encode() for value in it["values"]]
            data = b"".join(parts)
            starts = np.cumsum([0, *map(len, parts)])[:-1].astype("<u8")
            return self._new(
                "enumeration_alloc", name.encode(), CODES[it["dtype"]], c.c_uint32(VAR), ordered,
                data, c.c_uint64(len(data)), _pointer(starts), c.c_uint64(starts.nbytes),
            )  # fmt: skip
        values = np.array(it["values"], dtype_of(it["dtype"]))
        return self._new(
            "enumeration_alloc", name.encode(), CODES[it["dtype"]], c.c_uint32(1), ordered,
            _pointer(values), c.c_uint64(values.nbytes), None, c.c_uint64(0),
        )  # fmt: skip

    def _set_current_domain(self, schema: Any, domain: Any, spec: Mapping[str, Any]) -> None:
        class Range(c.Structure):
            _fields_ = (
                ("min", c.c_void_p), ("min_size", c.c_uint64), ("max", c.c_void_p),
                ("max_size", c.c_uint64),
            )  # fmt: skip

        rectangle = self._new("ndrectangle_alloc", domain)
        for number, (dim, bounds) in enumerate(
            zip(spec["dims"], spec["current_domain"], strict=True)
        ):
            low, high = (np.array([it], dtype_of(dim["dtype"])) for it in bounds)
            span = Range(low.ctypes.data, low.nbytes, high.ctypes.data, high.nbytes)
            self.call("ndrectangle_set_range", rectangle, c.c_uint32(number), c.byref(span))
        current = self._new("current_domain_create")
        self.call("current_domain_set_ndrectangle", current, rectangle)
        self.call("array_schema_set_current_domain", schema, current)

    def _open(self, uri: str, mode: int, start: int | None, end: int | None) -> Any:
        array = self._new("array_alloc", uri.encode())
        if self.has("array_set_open_timestamp_end"):  # older versions take the clock
            if start is not None:
                self.call("array_set_open_timestamp_start", array, c.c_uint64(start))
            if end is not None:
                self.call("array_set_open_timestamp_end", array, c.c_uint64(end))
        self.call("array_open", array, mode)
        return array

    def _close(self, array: Any) -> None:
        self.call("array_close", array)
        self._lib.tiledb_array_free(c.byref(array))

    def write(
        self,
        uri: str,
        spec: Mapping[str, Any],
        data: Mapping[str, Raw],
        *,
        region: Sequence[Sequence[int]] | None = None,
        time: int | None = None,
    ) -> None:
        """Write cells: of a dense array those of a region in row-major order."""
        array = self._open(uri, _WRITE, None, time)
        query = self._new("query_alloc", array, _WRITE)
        kept = _Kept()
        self.call("query_set_layout", query, _ORDERS["unordered" if spec["sparse"] else "row"])
        if region is not None:
            self._set_region(array, query, spec, region, kept)
        for name, raw in self._buffers(spec, data).items():
            self._set_buffer(query, name, raw, kept)
        self.call("query_submit", query)
        self.call("query_finalize", query)
        self._close(array)

    def _buffers(self, spec: Mapping[str, Any], data: Mapping[str, Raw]) -> dict[str, Raw]:
        """Return buffers by name; before version 2 coordinates come interleaved."""
        if self.version >= (2, 0) or not spec["sparse"]:
            return dict(data)
        names = [dim["name"] for dim in spec["dims"]]
        table = np.stack([data[name].values for name in names], axis=1)
        rest = {name: raw for name, raw in data.items() if name not in names}
        return {"__coords": Raw(np.ascontiguousarray(table).reshape(-1)), **rest}

    def _set_region(
        self, array: Any, query: Any, spec: Mapping[str, Any], region: Any, kept: _Kept
    ) -> None:
        if self.has("query_set_subarray_t") and self.has("subarray_alloc"):
            subarray = self._new("subarray_alloc", array)
            for number, (dim, (low, high)) in enumerate(zip(spec["dims"], region, strict=True)):
                if dim["dtype"] == "ascii":
                    texts = low.encode(), high.encode()
                    self.call(
                        "subarray_add_range_var", subarray, c.c_uint32(number), texts[0],
                        c.c_uint64(len(texts[0])), texts[1], c.c_uint64(len(texts[1])),
                    )  # fmt: skip
                    continue
                ends = [np.array([it], dtype_of(dim["dtype"])) for it in (low, high)]
                kept.things.append(ends)
                self.call(
                    "subarray_add_range", subarray, c.c_uint32(number), *map(_pointer, ends), None
                )
            self.call("query_set_subarray_t", query, subarray)
            return
        if self.version >= (2, 0):
            for number, (dim, (low, high)) in enumerate(zip(spec["dims"], region, strict=True)):
                ends = [np.array([it], dtype_of(dim["dtype"])) for it in (low, high)]
                kept.things.append(ends)
                self.call("query_add_range", query, c.c_uint32(number), *map(_pointer, ends), None)
            return
        flat = np.array(region, dtype_of(spec["dims"][0]["dtype"])).reshape(-1)
        kept.things.append(flat)
        self.call("query_set_subarray", query, _pointer(flat))

    def _set_buffer(self, query: Any, name: str, raw: Raw, kept: _Kept) -> list[Any]:
        """Set the buffers of a field; return what will hold their sizes."""
        label = name.encode()
        size = c.c_uint64(raw.values.nbytes)
        sizes = [size]
        offset_size, valid_size = c.c_uint64(), c.c_uint64()
        if raw.offsets is not None:
            offset_size = c.c_uint64(raw.offsets.nbytes)
            sizes.append(offset_size)
        if raw.valid is not None:
            valid_size = c.c_uint64(raw.valid.nbytes)
            sizes.append(valid_size)
        kept.things.append((raw, sizes))
        values = _pointer(raw.values), c.byref(size)
        offsets = () if raw.offsets is None else (_pointer(raw.offsets), c.byref(offset_size))
        valid = () if raw.valid is None else (_pointer(raw.valid), c.byref(valid_size))
        if self.has("query_set_data_buffer"):
            self.call("query_set_data_buffer", query, label, *values)
            if offsets:
                self.call("query_set_offsets_buffer", query, label, *offsets)
            if valid:
                self.call("query_set_validity_buffer", query, label, *valid)
        else:
            kind = ("_var" if offsets else "") + ("_nullable" if valid else "")
            self.call(f"query_set_buffer{kind}", query, label, *offsets, *values, *valid)
        return sizes

    def read(
        self,
        uri: str,
        spec: Mapping[str, Any],
        *,
        names: Sequence[str] | None = None,
        region: Sequence[Sequence[Any]] | None = None,
        start: int | None = None,
        end: int | None = None,
        order: str | None = None,
        room: int = _ROOM,
    ) -> dict[str, Raw]:
        """Read fields: by default of a dense array in row-major order, of a sparse one in any."""
        array = self._open(uri, _READ, start, end)
        query = self._new("query_alloc", array, _READ)
        kept = _Kept()
        default = "unordered" if spec["sparse"] else "row"
        self.call("query_set_layout", query, _ORDERS[order or default])
        if region is not None:
            self._set_region(array, query, spec, region, kept)
        fields = _fields(spec, names)
        if self.version < (2, 0) and spec["sparse"]:
            dims = spec["dims"]
            coords = {**dims[0], "ncells": len(dims)}
            fields = {"__coords": coords, **{it["name"]: it for it in spec["attrs"]}}
        given = {name: _room(it, room) for name, it in fields.items()}
        sizes = {name: self._set_buffer(query, name, raw, kept) for name, raw in given.items()}
        self.call("query_submit", query)
        status = c.c_int()
        self.call("query_get_status", query, c.byref(status))
        if status.value != 1:
            raise EngineError(f"the query ended with status {status.value}")
        found = {name: _filled(raw, sizes[name]) for name, raw in given.items()}
        self._close(array)
        if "__coords" in found:
            table = found.pop("__coords").values.reshape(-1, len(spec["dims"]))
            for number, dim in enumerate(spec["dims"]):
                found[dim["name"]] = Raw(np.ascontiguousarray(table[:, number]))
        return found

    def consolidate(
        self, uri: str, settings: Mapping[str, str], *, time: int | None = None
    ) -> None:
        """Consolidate; settings are those of ``sm.consolidation``."""
        plain = {f"sm.consolidation.{key}": value for key, value in settings.items()}
        if time is not None:
            plain["sm.consolidation.timestamp_end"] = str(time)
        self.call("array_consolidate", uri.encode(), self._config(plain))

    def vacuum(self, uri: str, mode: str = "fragments") -> None:
        """Remove what a consolidation replaced."""
        settings = {"sm.vacuum.mode": mode}
        self.call("array_vacuum", uri.encode(), self._config(settings))

    def delete(self, uri: str, condition: Any, spec: Mapping[str, Any], *, time: int) -> None:
        """Delete the cells for which a condition holds."""
        array = self._open(uri, _DELETE, None, time)
        query = self._new("query_alloc", array, _DELETE)
        kept = _Kept()
        self.call("query_set_condition", query, self._condition(condition, spec, kept))
        self.call("query_submit", query)
        self._close(array)

    def _condition(self, it: Any, spec: Mapping[str, Any], kept: _Kept) -> Any:
        """Return a condition: ``[field, operator, value]``, or ``["and" | "or", one, other]``."""
        if it[0] in ("and", "or"):
            sides = [self._condition(side, spec, kept) for side in it[1:]]
            return self._new("query_condition_combine", *sides, 0 if it[0] == "and" else 1)
        if it[0] == "not":
            return self._new("query_condition_negate", self._condition(it[1], spec, kept))
        name, operator, value = it
        about = _fields(spec, None)[name]
        if operator in ("in", "not in"):
            if about["dtype"] in ("ascii", "utf8"):
                parts = [one.encode() for one in value]
            else:
                parts = [np.array([one], dtype_of(about["dtype"])).tobytes() for one in value]
            data = b"".join(parts)
            starts = np.cumsum([0, *map(len, parts)])[:-1].astype("<u8")
            kept.things.append((data, starts))
            return self._new(
                "query_condition_alloc_set_membership", name.encode(), data,
                c.c_uint64(len(data)), _pointer(starts), c.c_uint64(starts.nbytes),
                _OPERATORS[operator],
            )  # fmt: skip
        if isinstance(value, str):
            data = value.encode()
        else:
            data = np.array([value], dtype_of(about["dtype"])).tobytes()
        made = self._new("query_condition_alloc")
        size = c.c_uint64(len(data))
        self.call("query_condition_init", made, name.encode(), data, size, _OPERATORS[operator])
        return made

    def evolve(self, uri: str, step: Mapping[str, Any]) -> None:
        """Drop and add attributes."""
        made = self._new("array_schema_evolution_alloc")
        for name in step.get("drop", ()):
            self.call("array_schema_evolution_drop_attribute", made, name.encode())
        for attr in step.get("add", ()):
            self.call("array_schema_evolution_add_attribute", made, self._attribute(attr))
        if self.has("array_schema_evolution_set_timestamp_range"):
            times = c.c_uint64(step["time"]), c.c_uint64(step["time"])
            self.call("array_schema_evolution_set_timestamp_range", made, *times)
        self.call("array_evolve", uri.encode(), made)

    def put_metadata(self, uri: str, step: Mapping[str, Any]) -> None:
        """Set and remove metadata of an array."""
        array = self._open(uri, _WRITE, None, step["time"])
        self._put_metadata("array", array, step)
        self._close(array)

    def _put_metadata(self, kind: str, thing: Any, step: Mapping[str, Any]) -> None:
        for key, (dtype, values) in step.get("set", {}).items():
            if dtype in ("utf8", "ascii", "char"):
                data = np.frombuffer(values.encode(), "u1")
            else:
                data = np.array(values, dtype_of(dtype)).reshape(-1)
            self.call(
                f"{kind}_put_metadata", thing, key.encode(), CODES[dtype], c.c_uint32(len(data)),
                _pointer(data) if len(data) else None,
            )  # fmt: skip
        for key in step.get("delete", ()):
            self.call(f"{kind}_delete_metadata", thing, key.encode())

    def create_group(self, uri: str) -> None:
        """Create a group."""
        self.call("group_create", uri.encode())

    def change_group(self, uri: str, step: Mapping[str, Any]) -> None:
        """Add and remove members, and set metadata."""
        group = self._new("group_alloc", uri.encode())
        if self.has("group_set_config") and step.get("time") is not None:
            settings = {"sm.group.timestamp_end": str(step["time"])}
            self.call("group_set_config", group, self._config(settings))
        self.call("group_open", group, 4 if step.get("exclusive") else _WRITE)
        for member in step.get("add", ()):
            name = None if member.get("name") is None else member["name"].encode()
            relative = c.c_uint8(1 if member.get("relative", True) else 0)
            arguments = [group, member["uri"].encode(), relative, name]
            self.call("group_add_member", *arguments)
        for name in step.get("remove", ()):
            self.call("group_remove_member", group, name.encode())
        self._put_metadata("group", group, step)
        self.call("group_close", group)


def _room(it: Mapping[str, Any], room: int) -> Raw:
    """Return buffers for the cells of a field."""
    dtype = dtype_of(it["dtype"])
    is_var = it.get("var") or (it["dtype"] == "ascii" and "domain" in it)
    count = room // dtype.itemsize if is_var else room // 64 * it.get("ncells", 1)
    raw = Raw(np.zeros(count, dtype))
    if is_var:
        raw.offsets = np.zeros(room // 64, "<u8")
    if it.get("nullable"):
        raw.valid = np.zeros(room // 64, "u1")
    return raw


def _filled(raw: Raw, sizes: Sequence[Any]) -> Raw:
    """Return the part of buffers that the library filled, given its bytes."""
    counts = [it.value for it in sizes]
    cut = Raw(raw.values[: counts.pop(0) // raw.values.dtype.itemsize].copy())
    if raw.offsets is not None:
        cut.offsets = raw.offsets[: counts.pop(0) // 8].copy()
    if raw.valid is not None:
        cut.valid = raw.valid[: counts.pop(0)].copy()
    return cut


def _fields(spec: Mapping[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    dims = {it["name"]: it for it in spec["dims"]} if spec["sparse"] else {}
    every = {**dims, **{it["name"]: it for it in spec["attrs"]}}
    return every if names is None else {name: every[name] for name in names}


def _pointer(values: npt.NDArray[Any]) -> Any:
    return values.ctypes.data_as(c.c_void_p)
