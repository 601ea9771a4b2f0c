"""What ``python -m bench live`` takes as the truth."""

from argparse import Namespace
from pathlib import Path

import pytest

from bench import live
from bench.cluster import ClusterError
from bench.live import sent_as
from bench.live_held import HeldPages, prefix
from bench.live_idle import Look, idle_share
from conductor.simulator.workloads import made_up
from kvstore.events.publisher import EventBatch, RemovedEvent, StoredEvent

KEYS = [bytes([one]) * 32 for one in range(4)]


def stored(count: int, medium: str = "CPU", begin: int = 0) -> StoredEvent:
    return StoredEvent(
        block_hashes=KEYS[begin:count], parent_block_hash=None, token_ids=[], block_size=64,
        medium=medium,
    )  # fmt: skip


def test_pages_are_held_from_their_event_on_until_they_have_left_every_tier() -> None:
    held = HeldPages()
    held.take(EventBatch(10.0, [stored(3)]))
    held.take(EventBatch(20.0, [stored(2, "STORAGE")]))
    held.take(EventBatch(30.0, [RemovedEvent(block_hashes=KEYS[:3], medium="CPU")]))
    held.take(EventBatch(40.0, [RemovedEvent(block_hashes=KEYS[1:2], medium="STORAGE")]))
    held.take(EventBatch(50.0, [stored(2)]))
    times = (9.9, 10.0, 29.9, 30.0, 39.9, 40.0, 50.0)
    assert [prefix([held], KEYS, at) for at in times] == [0, 3, 3, 2, 2, 1, 2]


def test_a_page_counts_that_either_has_even_if_neither_has_all_before_it() -> None:
    engine, node = HeldPages(), HeldPages()
    engine.take(EventBatch(1.0, [stored(1), stored(4, begin=3)]))
    node.take(EventBatch(2.0, [stored(3, begin=1)]))
    assert [prefix([engine, node], KEYS, at) for at in (0.5, 1.5, 2.5)] == [0, 1, 4]


def test_equal_blocks_have_equal_tokens_and_ends_are_their_own() -> None:
    first, *others = (sent_as(one, 64) for one in made_up("sessions", 40))
    found = [one for one in others if one.traced.blocks[:1] == first.traced.blocks[:1]]
    assert found
    assert all(one.prompt[:64] == first.prompt[:64] for one in found)
    ends = [tuple(one.prompt[-8:]) for one in (first, *others) if len(one.prompt) % 64 >= 8]
    assert len(set(ends)) == len(ends)


def test_without_the_trace_it_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert live.run(Namespace(trace=tmp_path / "none.jsonl", json=True)) == 0
    assert "skipped" in capsys.readouterr().err


def test_an_engine_is_idle_in_vain_only_while_requests_wait() -> None:
    looks = [
        Look(0.0, 0, {"P1": 5.0, "P2": 5.0}),
        Look(1.0, 3, {"P1": 6.0, "P2": 6.0}),
        Look(2.0, 1, {"P1": 6.0, "P2": 6.1}),
        Look(5.0, 1, {"P1": 6.2, "P2": 6.4}),
        Look(6.0, 0, {"P1": 7.0, "P2": 7.0}),
    ]
    assert idle_share(looks) == pytest.approx(0.1)
    with pytest.raises(ClusterError, match="saturated"):
        idle_share(looks[:2])
