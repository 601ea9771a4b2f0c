"""Limits of what a worker may send, and payloads that are wrong in any way."""

import gc
import random
import time
from typing import Any

import msgspec
import pytest

from kvstore.index import apply as applying
from kvstore.index import payload as decoding
from kvstore.index.blocks import BlockLimits
from kvstore.index.payload import read_payload
from kvstore.index.reading import UnreadableError
from kvstore.mover.chains import Chains, WordBuffer
from tests.index.applied import (
    IMPLEMENTATIONS,
    KEYS,
    PACK,
    Applied,
    each,
    pages,
    pages_gone,
    prompt,
    removed,
    stored,
)
from tests.index.hostile import Hostile, stall_s


def test_long_batches_are_applied_in_steps() -> None:
    applied = Applied()
    assert applied.apply(*(pages(KEYS) for _ in range(5))) == 2
    assert applied.apply(*(pages(KEYS[:1]) for _ in range(1_000))) == 4
    assert len(applied.entries) == 3_000


def test_blocks_that_have_waited_for_one_are_stored_in_steps() -> None:
    ids = prompt(8_004)
    applied = Applied(limits=BlockLimits(10_000, 10_000, 1 << 24))
    applied.apply(*(stored([n], ids[4 * n : 4 * n + 4], n - 1) for n in range(1, 1_001)))
    applied.apply(*(stored([n], ids[4 * n : 4 * n + 4], 0) for n in range(1_001, 2_001)))
    assert applied.ingest.blocks.waiting == 2_000

    assert applied.apply(stored([0], ids[:4])) > 2_000 // 256
    assert len(applied.entries) == 2_001
    assert applied.ingest.blocks.waiting == 0


def test_media_and_groups_that_nobody_has_heard_of_are_bounded() -> None:
    applied = Applied()
    ids = prompt(4)
    for number in range(100):
        applied.apply(pages(KEYS[:2], medium=f"medium {number}"))
    assert len(applied.entries) == 2 * applying.MEDIA_MAX
    assert applied.ingest.skipped == 100 - applying.MEDIA_MAX
    applied.ingest.clear()
    for number in range(-50, 200):
        applied.apply(stored([number % 2**64], ids, group_idx=number))
    assert len(applied.entries) == applying.GROUPS_MAX
    assert len(applied.ingest.groups) <= applying.GROUPS_MAX


def test_extra_keys_of_more_blocks_than_an_event_may_have_are_not_mapped() -> None:
    applied = Applied()
    extra = [[["x", 1]]] * 200_000
    applied.apply(stored([1], [5]))
    applied.apply({**stored([2], [5] * 200_000, extra_keys=extra), "block_size": 1})
    assert len(applied.entries) == 1
    assert applied.ingest.skipped == 1


@pytest.mark.parametrize(
    "extra",
    [[["x"] * 65], [[[]] * 64] * 8_200, [None] * 65_536 + [["x"]]],
    ids=["a long list", "many bytes", "many blocks"],
)
def test_more_extra_keys_than_a_step_can_have_are_not_decoded(extra: list[Any]) -> None:
    applied = Applied()
    applied.apply(stored([1], prompt(4), extra_keys=extra))
    applied.apply(stored([2], prompt(4), extra_keys=[["x"] * 64]))
    assert applied.ingest.skipped == 1
    assert len(applied.entries) == 1


def test_events_that_are_much_work_are_applied_one_at_a_time() -> None:
    applied = Applied()
    applied.apply(stored([1], prompt(4)))
    assert applied.apply(*[{"type": "AllBlocksCleared"}] * 160) >= 10
    extra = [[["x"] * 60]] * 1_000
    assert applied.apply(*[stored([1], prompt(4), extra_keys=extra)] * 5) == 5


def test_blocks_of_one_name_that_wait_are_removed_without_a_stall() -> None:
    applied = Applied(limits=BlockLimits(1_000, 16_384, 1 << 24))
    for group in range(2):
        event = stored([7], [5], 99, group_idx=group)
        applied.apply(*[event] * 8_192)
    assert applied.ingest.blocks.waiting == 16_384
    before = time.thread_time()
    applied.apply(removed([7] * 65_536, group_idx=1))
    assert time.thread_time() - before < stall_s(0)
    assert applied.ingest.blocks.waiting == 8_192


def test_a_window_that_no_prompt_fills_is_none() -> None:
    applied = Applied()
    for group, window in enumerate([2**64 - 1, 2**31 + 1, 2**31, -(2**63)]):
        spec = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": window}
        applied.apply(stored([group], prompt(1), group_idx=group, **spec))
    last = [applied.ingest.groups[group].last_blocks for group in range(4)]
    assert last == [0, 0, 2**31, 0]


def test_a_kind_of_kv_group_with_a_long_name_cannot_be_read() -> None:
    applied = Applied()
    with pytest.raises(UnreadableError):
        applied.apply(stored([1], prompt(1), kv_cache_spec_kind="k" * 65))


def test_names_of_shards_that_mean_nothing_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applying, "NAMES_MAX", 10)
    applied = Applied()
    applied.apply(*(pages(KEYS[n : n + 1], shard_digest=f"?{n}") for n in range(20)))
    assert len(applied.entries) == 10
    assert applied.ingest.skipped == 10
    applied.apply(*(pages_gone(KEYS[n : n + 1], shard_digest=f"?{n}") for n in range(20)))
    assert not applied.entries


def test_holders_beyond_what_there_is_room_for_are_counted() -> None:
    applied = Applied(holders_max=2)
    applied.apply(*(pages(KEYS[:1], shard=shard) for shard in (0, 1, 2, 0, 2)))
    applied.apply(pages_gone(KEYS[:1], shard=2))
    assert len(applied.entries) == 2
    assert applied.ingest.without_holder == 2


def test_events_of_unknown_kinds_are_counted_and_the_others_applied() -> None:
    applied = Applied()
    applied.apply(pages(KEYS[:1]), {"type": "SomethingNew", "x": [1]}, pages(KEYS[1:2]))
    assert len(applied.entries) == 2
    assert applied.ingest.skipped == 1
    with pytest.raises(UnreadableError):
        applied.apply(pages(KEYS[2:3], block_size=0))
    with pytest.raises(UnreadableError):
        applied.payload(PACK([1.0, [{"nothing": 1}], None]))


@each
def test_a_batch_that_is_cut_off_anywhere_cannot_be_read(chains: Chains) -> None:
    events = [stored([1, 2], [5] * 8), removed([1]), pages(KEYS[:3])]
    payload = msgspec.msgpack.encode([1.0, events, None])
    for end in range(len(payload)):
        applied = Applied(chains)
        with pytest.raises(UnreadableError):
            applied.payload(payload[:end])
        applied.ingest.clear()
        assert applied.entries == set()
    assert Applied(chains).payload(payload) == 0


@pytest.mark.parametrize("limit", [65_536, 65_537])
def test_more_hashes_than_an_event_may_have_cannot_be_read(limit: int) -> None:
    applied = Applied()
    hashes = list(range(limit))
    event = stored(hashes, [5] * limit)
    if limit <= 65_536:
        applied.apply(event, event)
        assert len(applied.entries) == limit
    else:
        with pytest.raises(UnreadableError):
            applied.apply(event)


def decoded(payload: bytes, chains: Chains) -> Any:
    """What is read of a payload, so that it can be compared."""
    try:
        published, events, unknown = read_payload(payload, chains, WordBuffer(64))
    except UnreadableError:
        return None
    fields = [
        [bytes(x) if isinstance(x, msgspec.Raw) else x for x in msgspec.structs.astuple(event)]
        for event in events
    ]
    return repr(published), fields, unknown


def test_a_payload_is_read_the_same_with_and_without_a_look_at_its_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decoding, "LONG_BYTES", 0)
    dice, read = Hostile(12), 0
    for number in range(1_500):
        payload = dice.payload()
        plain = decoded(payload, IMPLEMENTATIONS[0])
        assert decoded(payload, IMPLEMENTATIONS[-1]) == plain, number
        read += plain is not None
    assert 100 < read < 1_500


@each
@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(2.0, id="quick"),
        pytest.param(0.0, id="soak", marks=pytest.mark.soak("events", minutes=1.0)),
    ],
)
def test_no_payload_ends_or_holds_up_who_applies_it(
    chains: Chains, seconds: float, soak_s: float
) -> None:
    seed = 11 if seconds else random.SystemRandom().randrange(2**32)
    dice = Hostile(seed)
    applied = Applied(chains, limits=BlockLimits(5_000, 500, 100_000))
    unreadable, batches, worst = 0, 0, 0.0
    gc.collect()
    gc.freeze()
    end = time.monotonic() + (seconds or soak_s)
    try:
        while time.monotonic() < end:
            payload = dice.payload()
            before = time.thread_time()
            try:
                for _ in applied.ingest.apply(payload, applied.batch):
                    worst = max(worst, time.thread_time() - before)
                    applied._take()
                    before = time.thread_time()
            except UnreadableError:
                unreadable += 1
                applied.ingest.clear()
            worst = max(worst, time.thread_time() - before)
            applied._take()
            batches += 1
            if batches % 20 == 0:
                applied.ingest.blocks.check()
        assert 0 < unreadable < batches
        applied.ingest.clear()
        assert not applied.entries
        if chains is IMPLEMENTATIONS[-1]:
            assert worst < stall_s(seconds or soak_s), f"seed {seed}"
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    finally:
        gc.unfreeze()
