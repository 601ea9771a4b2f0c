"""Goal: KV arrives byte for byte whatever the ranks of both sides hold, or for no rank at all."""

import random

import numpy as np
import pytest

from kvstore import mover
from kvstore.handoff.decode import DecodeManager
from kvstore.handoff.memory import HandoffPool
from kvstore.handoff.prefill import PrefillManager
from kvstore.handoff.ranks import RankGroup, RankPart, data_rank_of
from kvstore.handoff.registry import HandoffRegistry
from kvstore.handoff.shape import PoolShape
from kvstore.handoff.staging import Staging
from kvstore.handoff.states import FailureCode, State
from kvstore.mover.kvpool import HeadRows, KVPool
from kvstore.mover.memory import memory_at
from kvstore.protocol.errors import InvalidArgument
from tests.handoff.pair import PATIENCE, SECRET, SPACE
from tests.handoff.ranked import (
    BLOCK_TOKENS,
    BLOCKS,
    HEADS,
    LAYERS,
    Ranked,
    RankMemory,
    ranked,
    whole_of,
)
from tests.handoff.test_ranks import grid


def split(layers: int = 1, heads: int = 1, copies: int = 1) -> list[RankPart]:
    """So many pipeline stages of so many ranks, each so many times."""
    return grid(
        list(range(0, LAYERS + 1, LAYERS // layers)),
        list(range(0, HEADS + 1, HEADS // heads)),
        copies,
    )


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (split(), split()),
        (split(heads=2), split()),
        (split(), split(heads=2)),
        (split(heads=2), split(heads=2)),
        (split(heads=2), split(heads=4)),
        (split(heads=4), split(heads=2)),
        (split(layers=2), split(heads=2)),
        (split(layers=2, heads=2), split(layers=4)),
        (split(heads=2, copies=2), split(heads=2)),
        (split(heads=2), split(heads=2, copies=2)),
        (split(copies=3), split(heads=2)),
        (grid([0, 1, 4], [0, 1, 4]), grid([0, 3, 4], [0, 2, 4])),
    ],
    ids=str,
)
def test_kv_arrives_whole_at_every_rank_in_scattered_blocks(prefill, decode, wait_until):
    shuffled = random.Random(5)
    with ranked(prefill, decode) as engines:

        def hand_over(room):
            whole = whole_of(room, 10)
            here, there = (shuffled.sample(range(BLOCKS), 10) for _ in range(2))
            senders, receivers = engines.begin(room, 10)
            for receiver in receivers:
                receiver.announce(0, there)
            engines.push(senders, whole, here)
            wait_until(lambda: all(one.progress.ended for one in (*senders, *receivers)))

            assert [one.failure for one in (*senders, *receivers)] == [None] * len(
                senders + receivers
            )
            assert engines.wrong(whole, there) == []
            assert {one.aux().first_token for one in receivers} == {7}
            size = whole.nbytes * len(decode) // (len({str(part) for part in decode}))
            sent = sum(one.progress.moved_bytes for one in senders)
            assert size <= sent < size + 1_000 * len(decode), "each byte is sent once"
            wait_until(lambda: not any(one.holds_blocks for one in (*senders, *receivers)))
            for one in (*senders, *receivers):
                one.close()

        for room in (1, 2):
            hand_over(room)


def test_what_decode_has_already_is_not_sent_and_other_blocks_do_not_change(wait_until):
    with ranked(split(heads=2), split(heads=4)) as engines:
        whole = whole_of(1, 6)
        senders, receivers = engines.begin(1, 6)
        for receiver in receivers:
            receiver.announce(4 * BLOCK_TOKENS + 1, [50, 40])
        engines.push(senders, whole, [5, 4, 3, 2, 1, 0])
        wait_until(lambda: all(one.state == State.SUCCESS for one in receivers))

        assert engines.wrong(whole, [50, 40], 4) == []
        others = [block for block in range(BLOCKS) if block not in (40, 50)]
        assert not any(memory.planes[:, others].any() for memory in engines.there)


def test_a_sender_starts_when_all_its_receivers_have_announced(wait_until):
    with ranked(split(), split(heads=2)) as engines:
        senders, (one, other) = engines.begin(1, 4)
        one.announce(0, [0, 1, 2, 3])
        engines.push(senders, whole_of(1, 4), [0, 1, 2, 3])
        wait_until(lambda: engines.prefill[0].describe()[0].missing == [])
        other.renew()
        assert senders[0].state == State.BOOTSTRAPPING
        assert senders[0].progress.moved_bytes == 0
        other.announce(0, [9, 8, 7, 6])
        wait_until(lambda: one.state == other.state == State.SUCCESS)
        wait_until(lambda: senders[0].state == State.SUCCESS)


def test_a_rank_that_sends_nothing_ends_by_itself_and_nobody_waits_for_it(wait_until):
    with ranked(split(copies=2), split()) as engines:
        (busy, idle), (receiver,) = engines.begin(1, 4)
        receiver.announce(0, [0, 1, 2, 3])
        wait_until(lambda: idle.state == State.SUCCESS)
        assert not idle.holds_blocks
        whole = whole_of(1, 4)
        engines.push([busy, idle], whole, [0, 1, 2, 3])
        wait_until(lambda: busy.state == receiver.state == State.SUCCESS)
        assert idle.progress.moved_bytes == 0
        assert engines.wrong(whole, [0, 1, 2, 3]) == []


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_an_abort_by_one_rank_ends_the_handoff_at_all_that_it_exchanges_kv_with(who, wait_until):
    with ranked(split(heads=2), split()) as engines:
        senders, receivers = engines.begin(1, 4)
        receivers[0].announce(0, [0, 1, 2, 3])
        wait_until(lambda: all(one.state == State.WAITING_FOR_INPUT for one in senders))
        (senders if who == "sender" else receivers)[0].abort()
        wait_until(lambda: all(one.state == State.FAILED for one in (*senders, *receivers)))
        wait_until(lambda: not any(one.holds_blocks for one in (*senders, *receivers)))
        assert {one.failure.code for one in (*senders, *receivers)} == {FailureCode.ABORTED}

        for one in (*senders, *receivers):
            one.close()
        whole = whole_of(2, 4)
        senders, receivers = engines.begin(2, 4)
        receivers[0].announce(0, [0, 1, 2, 3])
        engines.push(senders, whole, [0, 1, 2, 3])
        wait_until(lambda: receivers[0].state == State.SUCCESS)
        assert engines.wrong(whole, [0, 1, 2, 3]) == []


def test_a_rank_that_goes_fails_the_handoffs_of_the_others_and_their_blocks_come_back(wait_until):
    with ranked(split(heads=2), split(heads=4)) as engines:
        senders, receivers = engines.begin(1, 4)
        for receiver in receivers:
            receiver.announce(0, [0, 1, 2, 3])
        wait_until(lambda: all(one.state == State.WAITING_FOR_INPUT for one in senders))
        engines.prefill[0].close()
        wait_until(lambda: all(one.state == State.FAILED for one in receivers[:2]))
        wait_until(lambda: not any(one.holds_blocks for one in receivers[:2]))
        assert receivers[2].state == State.WAITING_FOR_INPUT, "the engine's reduce tells it"
        receivers[2].abort()
        wait_until(lambda: all(one.state == State.FAILED for one in receivers))
        wait_until(lambda: all(one.state == State.FAILED for one in senders))
        wait_until(lambda: not any(one.holds_blocks for one in (*senders, *receivers)))


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_a_byte_that_changes_on_the_way_fails_the_handoff(ranks, wait_until, monkeypatch):
    gather = Staging.gather

    def changed(self, *args):
        places, digests = gather(self, *args)
        memory_at(*places[-1])[-1] ^= 1
        return places, digests

    monkeypatch.setattr(Staging, "gather", changed)
    with ranked(split(heads=ranks[0]), split(heads=ranks[1])) as engines:
        senders, receivers = engines.begin(1, 4)
        for receiver in receivers:
            receiver.announce(0, [0, 1, 2, 3])
        engines.push(senders, whole_of(1, 4), [0, 1, 2, 3])
        wait_until(lambda: all(one.progress.ended for one in (*senders, *receivers)))
        assert FailureCode.DIGEST in {one.failure.code for one in receivers}
        wait_until(lambda: not any(one.holds_blocks for one in (*senders, *receivers)))


def test_the_digest_of_other_heads_of_the_same_place_is_another_one():
    shape = PoolShape(8, 2, 64, 4, 8, 0, (0, 4))
    shares = [shape.whole._replace(heads=heads) for heads in ((0, 2), (2, 4), (0, 4))]

    assert len({share.seed_of(room) for share in shares for room in (1, 2)}) == 6


def test_a_block_that_is_given_away_before_its_heads_are_gathered_fails_the_handoff(wait_until):
    with ranked(split(), split(heads=2)) as engines:
        senders, receivers = engines.begin(1, 4)
        engines.push(senders, whole_of(1, 4), [0, 1, 2, 3])
        engines.here[0].generations[2] += 1
        for receiver in receivers:
            receiver.announce(0, [0, 1, 2, 3])
        wait_until(lambda: all(one.state == State.FAILED for one in receivers))
        assert {one.failure.code for one in receivers} == {FailureCode.BLOCKS_REUSED}
        wait_until(lambda: not any(one.holds_blocks for one in receivers))


@pytest.mark.parametrize(
    ("prefill", "decode", "said"),
    [
        (split(), grid([0, LAYERS], [0, HEADS + 1]), "heads"),
        (split(), grid([0, LAYERS + 1], [0, HEADS]), "layers"),
        (grid([0, LAYERS], [0, 2, HEADS])[1:], split(), "ranks"),
    ],
)
def test_ranks_that_cannot_fit_are_refused_by_field(prefill, decode, said, wait_until):
    registered = prefill if said != "ranks" else split(heads=2)
    with ranked(registered, decode) as engines:
        if said == "ranks":
            engines.prefill[0].close()  # it ends its lease
        receiver = engines.decode[0].receiver(1, engines.registry.url, BLOCK_TOKENS)
        wait_until(lambda: receiver.state == State.FAILED)
        assert receiver.failure.code == FailureCode.UNREACHABLE
        assert said in receiver.failure.message


def test_a_group_that_does_not_fit_to_the_pool_is_refused():
    memory = np.zeros((2, 4, 16 * 30), dtype=np.uint8)
    planes = tuple(plane.ctypes.data for plane in memory)
    pool = KVPool(planes, 16 * 30, 16 * 30, 4)
    for part, field in [(RankPart((0, 2), (0, 1)), "layers"), (RankPart((0, 1), (0, 4)), "heads")]:
        with pytest.raises(InvalidArgument) as caught:
            HandoffPool(pool, 16, None, RankGroup(0, (part,), bytes(16)))
        assert caught.value.field == field


def test_pieces_of_heads_are_checked_and_in_order():
    memory = np.arange(2 * 3 * 4 * 6 * 8, dtype=np.uint32)
    size = 4 * 6 * 8 * 4
    planes = tuple(int(memory.ctypes.data) + plane * 3 * size for plane in range(2))
    pool = KVPool(planes, size, size, 3)
    pieces = pool.head_pieces([1, 0], [[2, 0], [1, 1]], HeadRows(4, 6, 1, 3))
    target = np.zeros((2, 2, 4, 2, 8), dtype=np.uint32)
    pages = np.array([page.ctypes.data for page in target], dtype=np.uint64)
    mover.gather(pages, target[0].nbytes, pieces, np.zeros(2, dtype=np.uint64))
    known = memory.reshape(2, 3, 4, 6, 8)

    assert (target[0] == known[1, [2, 0], :, 1:3]).all()
    assert (target[1] == known[0, [1, 1], :, 1:3]).all()
    for planes, blocks, rows, field in [
        ([2], [[0]], HeadRows(4, 6, 0, 1), "planes"),
        ([0], [[3]], HeadRows(4, 6, 0, 1), "blocks"),
        ([0], [[0]], HeadRows(4, 6, 3, 3), "heads"),
        ([0], [[0]], HeadRows(4, 6, 5, 7), "heads"),
        ([0], [[0]], HeadRows(4, 5, 0, 1), "block_bytes"),
        ([0], [[0]], HeadRows(7, 1, 0, 1), "block_bytes"),
    ]:
        with pytest.raises(InvalidArgument) as caught:
            pool.head_pieces(planes, blocks, rows)
        assert caught.value.field == field


def test_a_room_is_pushed_by_its_data_parallel_rank(wait_until):
    parts = tuple(split(heads=2))
    registry = HandoffRegistry("127.0.0.1", 0, SECRET)
    here = [
        [RankMemory(RankGroup(rank, parts, bytes([data] * 16), data, 2)) for rank in range(2)]
        for data in range(2)
    ]
    there = RankMemory(RankGroup.alone(RankPart((0, LAYERS), (0, HEADS)), bytes(16)))
    prefill = [
        [PrefillManager(one.pool, SPACE, SECRET, registry=registry.url) for one in ranks]
        for ranks in here
    ]
    decode = DecodeManager(there.pool, SPACE, SECRET)
    engines = [Ranked(registry, here[data], [there], prefill[data], [decode]) for data in range(2)]
    try:
        for room in (6, 7):
            chosen = engines[data_rank_of(room, 2)]
            whole = whole_of(room, 4)
            senders, (receiver,) = chosen.begin(room, 4)
            receiver.announce(0, [4, 5, 6, 7])
            chosen.push(senders, whole, [0, 1, 2, 3])
            wait_until(lambda one=receiver: one.state == State.SUCCESS)
            assert chosen.wrong(whole, [4, 5, 6, 7]) == []
            wait_until(lambda all=senders: {one.state for one in all} == {State.SUCCESS})
            receiver.close()
    finally:
        for engine in engines:
            engine.close()


def test_links_are_made_when_all_ranks_of_prefill_have_registered(wait_until):
    with ranked(split(heads=2), split()) as engines:
        engines.prefill[1].close()  # it ends its lease
        receiver = engines.decode[0].receiver(1, engines.registry.url, BLOCK_TOKENS)
        wait_until(lambda: receiver.state == State.FAILED)
        assert "not registered" in receiver.failure.message
        back = PrefillManager(
            engines.here[1].pool, SPACE, SECRET, registry=engines.registry.url, patience=PATIENCE
        )
        engines.prefill[1] = back
        whole = whole_of(2, 2)
        senders, (receiver,) = engines.begin(2, 2)
        receiver.announce(0, [0, 1])
        engines.push(senders, whole, [0, 1])
        wait_until(lambda: receiver.state == State.SUCCESS)
        assert engines.wrong(whole, [0, 1]) == []
