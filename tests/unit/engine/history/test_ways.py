"""Ways of publishing: what they lack is refused in one place, and others can join."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, cast, get_args

import pytest

from icechunk_async import Repository
from icechunk_async.engine.files.binary_layout import BinaryLayout
from icechunk_async.engine.history import opening
from icechunk_async.engine.history.outcomes import read_if_there
from icechunk_async.engine.history.protocol import Capabilities, Feature
from icechunk_async.engine.history.ref_files import REF_FILES_WAY
from icechunk_async.engine.history.ref_files.history import RefFilesHistory, SeenRef
from icechunk_async.engine.history.way import Found
from icechunk_async.errors import UnsupportedBySpecError
from icechunk_async.format.refs import decode_ref
from tests.helpers import memory_url

if TYPE_CHECKING:
    from collections.abc import Callable

    from icechunk_async.storage import Storage

FEATURES = cast("tuple[Feature, ...]", get_args(Feature.__value__))
STATE_FEATURES = ("metadata", "status", "feature_flags", "operations_log", "repo_info_file")


def test_every_capability_can_be_required() -> None:
    """Each field but the two texts is a feature."""
    assert {it.name for it in fields(Capabilities)} == {"way", "instead", *FEATURES}


@pytest.mark.parametrize("feature", FEATURES)
def test_missing_feature_is_refused_with_advice(feature: Feature) -> None:
    """The message says what is missing, where, and what to do."""
    lacking = Capabilities("format version 0", "Do something else.")
    with pytest.raises(
        UnsupportedBySpecError, match=r"of format version 0 has no .* Do something else"
    ):
        lacking.require(feature)
    able: dict[str, Any] = {feature: True}
    replace(lacking, **able).require(feature)


@pytest.mark.parametrize("spec", [1, 2])
async def test_a_history_has_state_if_it_promises_any(spec: int) -> None:
    """Amending needs none."""
    async with Repository.create(memory_url(), spec_version=spec) as repository:
        history = repository.engine.history
        promised = [it for it in STATE_FEATURES if getattr(history.capabilities, it)]
        assert (history.state is not None) == bool(promised) == (spec == 2)


class _Numbered(RefFilesHistory):
    """Stands for a way that is not known yet."""

    capabilities = Capabilities("the numbered layout", "Move on.")


async def _detect(storage: Storage) -> Callable[[], Found] | None:
    main = await read_if_there(storage, REF_FILES_WAY.marker)
    if main is None:
        return None
    ref = SeenRef(decode_ref(main.data), main.version)
    return lambda: Found(
        "numbered",
        BinaryLayout(1),
        None,
        lambda *parts: _Numbered(parts[0], parts[1], ref, parts[2]),
    )


async def test_another_way_joins_by_an_entry_in_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repositories and sessions ask for capabilities, not for the way."""
    url = memory_url()
    async with Repository.create(url, spec_version=1) as repository:
        tip = await repository.lookup_branch("main")
    way = replace(REF_FILES_WAY, name="numbered", detect=_detect)
    monkeypatch.setattr(opening, "WAYS", (way, *opening.WAYS))
    async with Repository.open(url) as repository:
        assert await repository.branches() == {"main": tip}
        session = await repository.writable_session("main")
        with pytest.raises(UnsupportedBySpecError, match=r"numbered layout.* Move on"):
            await session.amend("not here")
        with pytest.raises(UnsupportedBySpecError, match="numbered layout"):
            await repository.get_status()
        assert await session.commit("here", allow_empty=True) != tip
