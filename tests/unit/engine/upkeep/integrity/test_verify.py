"""Verification: every damage that a level promises is found, and nothing is made up."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async import Repository, upkeep
from tests.unit.engine.upkeep.integrity.damaging import (
    LEVELS,
    MODES,
    damage,
    filled,
    healthy,
    kinds_of,
    promise,
)

if TYPE_CHECKING:
    from icechunk_async.upkeep import VerifyReport

_SEEDS = [1, 2, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(3, 60))]


async def verified(objects: dict[str, bytes], level: Any = "decode", **more: Any) -> VerifyReport:
    """Verify a repository made of these objects."""
    return await upkeep.verify(await filled(objects), level, **more)


@pytest.mark.sampled
@pytest.mark.parametrize("spec", [1, 2])
@pytest.mark.parametrize("seed", _SEEDS)
async def test_every_promised_damage_is_found_and_no_other_is(seed: int, spec: int) -> None:
    """One object of every kind, in every way, at the level that promises it and those above."""
    found = await healthy(seed, spec)
    for level in LEVELS:
        assert (await verified(found, level)).findings == ()
    needed = await _needed(found)
    ranges = await _ranges(found)
    tried: Counter[tuple[str, str]] = Counter()
    dice = random.Random(seed)
    for kind, keys in kinds_of(found).items():
        wanted = [key for key in keys if key in needed]
        for mode in MODES:
            made = damage(found, dice.choice(wanted), mode, dice)
            promised = promise(found, made, ranges)
            if promised is None:
                continue
            tried[kind, promised] += 1
            at = LEVELS.index(promised)
            for level in {promised, LEVELS[-1]}:
                report = await verified(made.objects, level)
                assert made.key in {it.location for it in report.findings}, (made.key, mode)
                assert all(LEVELS.index(it.level) <= LEVELS.index(level) for it in report.findings)
            if kind == "chunks" and at:  # the level below does not look, and says so
                below = await verified(made.objects, LEVELS[at - 1])
                assert below.is_healthy
                assert len(below.not_looked_at) > 0
    assert {kind for kind, _ in tried} >= {"snapshots", "transactions", "manifests", "chunks"}


async def _needed(objects: dict[str, bytes]) -> set[str]:
    """Return the keys of all objects that branches and tags lead to."""
    async with Repository.open(await filled(objects)) as repository:
        tips = {**await repository.branches(), **await repository.tags()}.values()
        ids = {str(it.id) for tip in tips async for it in repository.ancestry(snapshot_id=tip)}
        roots = {
            str(it.id)
            for tip in tips
            async for it in repository.ancestry(snapshot_id=tip)
            if it.parent_id is None
        }
    kept = {it: data for it, data in objects.items() if it.partition("/")[0] != "chunks"}
    chunks = {it.location for it in (await verified(kept, "length")).findings}
    kept = {it: data for it, data in objects.items() if it.partition("/")[0] != "manifests"}
    manifests = {it.location for it in (await verified(kept, "structure")).findings}
    logs = {f"transactions/{it}" for it in ids - roots}
    others = {it for it in objects if it.partition("/")[0] in ("repo", "refs", "config.yaml")}
    return {*chunks, *manifests, *(f"snapshots/{it}" for it in ids), *logs, *others}


async def _ranges(objects: dict[str, bytes]) -> dict[str, list[tuple[int, int]]]:
    """Return which bytes of each chunk object are chunks in use."""
    cleared = {
        key: bytes(len(data)) if key.startswith("chunks/") else data
        for key, data in objects.items()
    }
    ranges: dict[str, list[tuple[int, int]]] = {}
    for it in (await verified(cleared)).findings:
        assert it.offset is not None
        assert it.length is not None
        ranges.setdefault(it.location, []).append((it.offset, it.offset + it.length))
    return ranges
