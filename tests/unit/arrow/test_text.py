"""Conditions on text: chunks that statistics exclude are not needed, and rows are the same."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest
import xarray
import zarr

from icechunk_async import arrow
from icechunk_async.sync import Repository, RepositoryConfig
from icechunk_async.sync.storage import local_filesystem_storage
from tests.unit.arrow.queries import keep_only, objects_of

if TYPE_CHECKING:
    from pathlib import Path

ANY_LENGTH = np.dtypes.StringDType()
LAST = "\U0010ffff"
HOSTILE = ["", "a", "a\0", "a\0b", "é", "\ud7ff", "\ue000", "\U00010000", LAST, LAST * 9]
HOSTILE += ["x" * 31 + "é", "x" * 32, "x" * 31 + "b", "x" * 100 + "1", "x" * 100 + "2", "N/A"]


def make(
    folder: Path,
    values: list[str],
    chunk: int,
    dtype: Any,
    attributes: dict[str, Any] | None = None,
) -> Repository:
    """Commit texts and numbers beside each other, and analyze them."""
    config = RepositoryConfig(inline_chunk_threshold_bytes=0)
    repository = Repository.create(local_filesystem_storage(str(folder)), config)
    session = repository.writable_session("main")
    raw = np.array(values, dtype)
    for name, data in (("word", raw), ("n", np.arange(len(values)))):
        array = zarr.create_array(
            session.store,
            name=name,
            shape=data.shape,
            chunks=(chunk,),
            dtype=data.dtype,
            dimension_names=("x",),
            attributes=attributes if name == "word" else None,
        )
        array[:] = data
    session.commit("words")
    repository.analyze()
    return repository


starts_with: Any = pc.starts_with  # type: ignore[attr-defined]


def compared(column: Any, words: list[str]) -> list[pc.Expression]:
    """Return all comparisons of a column with words."""
    found = [column.is_null(), column.is_valid(), column.isin(words)]
    for it in words:
        literal = pa.scalar(it, pa.string())
        found += [column < literal, column <= literal, column > literal, column >= literal]
        found += [column == literal, column != literal, ~(column > literal)]
        found += [(column >= literal) & (column <= it + "z"), starts_with(column, it[:2])]
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("attributes", [{}, {"missing_value": "N/A"}, {"missing_value": "a\0"}])
@pytest.mark.parametrize("dtype", [None, ANY_LENGTH])
def test_rows_are_those_that_arrow_keeps_of_all_rows(
    tmp_path: Path, attributes: dict[str, str], dtype: Any, seed: int
) -> None:
    """Of hostile texts, in each order of bytes, with missing ones."""
    rng = random.Random(seed)
    values = sorted(rng.choices(HOSTILE, k=20), key=lambda it: (rng.random() < 0.2, it))
    make(tmp_path, values, 3, dtype, attributes)
    dataset = arrow.dataset(tmp_path)
    whole: Any = dataset.to_table()
    assert whole.schema.field("word").type == pa.string()
    plain = ds.dataset(whole)
    conditions = compared(pc.field("word"), [*HOSTILE, "x" * 100, "zz"])
    for condition in rng.sample(conditions, 40):
        found: Any = dataset.to_table(filter=condition)
        wanted: Any = plain.to_table(filter=condition)
        assert found.sort_by("n") == wanted.sort_by("n"), str(condition)


@pytest.mark.skipif(
    xarray.__version__ < "2026",
    reason="xarray before 2026.1 reads whole arrays of text when it opens a dataset",
)
def test_chunks_that_cannot_match_are_not_needed(tmp_path: Path) -> None:
    """They do not even exist; bounds that were cut exclude as well."""
    values = [f"{letter * 40}{number}" for letter in "abcd" for number in range(3)]
    repository = make(tmp_path, values, 3, ANY_LENGTH)
    keep_only(tmp_path, objects_of(repository, "/word", lambda it: it[0] == 2))
    dataset = arrow.dataset(tmp_path)
    word = pc.field("word")
    for condition, count in (
        (word == "c" * 40 + "1", 1),
        ((word > "bc") & (word < "d"), 3),
        (word.isin(["c" * 40 + "0", "c" * 40 + "2", "cc"]), 2),
        (starts_with(word, "c") & (word > "c") & (word < "cd"), 3),
    ):
        assert dataset.to_table(["word"], filter=condition).num_rows == count
    with pytest.raises(Exception, match=r"missing|damaged|not found"):
        dataset.to_table(["word"])


def test_engines_find_text_in_few_chunks(tmp_path: Path) -> None:
    """DuckDB and Polars hand their conditions on text over."""
    duckdb: Any = pytest.importorskip("duckdb", reason="duckdb is not installed")
    polars: Any = pytest.importorskip("polars", reason="polars is not installed")
    values = [f"{letter}{number}" for letter in "abcd" for number in range(3)]
    repository = make(tmp_path, values, 3, None)
    kept = objects_of(repository, "/word", lambda it: it[0] == 1)
    keep_only(tmp_path, kept | objects_of(repository, "/n", lambda it: it[0] == 1))
    words = arrow.dataset(tmp_path)
    with duckdb.connect() as connection:
        connection.register("words", words)
        question = "select n from words where word between 'b1' and 'b9' order by n"
        assert connection.sql(question).fetchall() == [(4,), (5,)]
    found = polars.scan_pyarrow_dataset(words).filter(polars.col("word") == "b2").collect()
    assert found["n"].to_list() == [5]


def test_text_that_xarray_shows_as_something_else_is_read(tmp_path: Path) -> None:
    """An attribute can make truth values of it, which have no bounds of text."""
    make(tmp_path, ["", "a", "b", ""], 2, None, {"dtype": "bool"})
    dataset = arrow.dataset(tmp_path)
    assert dataset.schema.field("word").type == pa.bool_()
    assert dataset.count_rows(pc.field("word")) == 2
