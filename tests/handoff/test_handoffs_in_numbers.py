"""Many handoffs one after another, and many at once, leave nothing behind."""

import gc
import sys
from dataclasses import replace

from kvstore.handoff.decode import Receiver
from kvstore.handoff.prefill import Sender
from kvstore.handoff.rooms import RoomNumbers
from kvstore.handoff.states import State
from tests.conftest import Held, wait_for
from tests.handoff.pair import PATIENCE, Pair, managers, push_all

BLOCKS_EACH = 2
WAIT_S = 20.0
OBJECTS_MORE_MOST = 500
"""Of Python, in 900 handoffs: caches and counters, but nothing for each."""


def hand_over(pair: Pair, rooms: list[int]) -> None:
    """Handoffs that are under way at the same time."""
    both = [pair.begin(room, BLOCKS_EACH) for room in rooms]
    blocks = [range(at, at + BLOCKS_EACH) for at in range(0, BLOCKS_EACH * len(rooms), BLOCKS_EACH)]
    for (_, receiver), here in zip(both, blocks, strict=True):
        receiver.announce(0, list(here))
    for (sender, _), here in zip(both, blocks, strict=True):
        push_all(sender, pair.here, list(here))
    ends = [end for one in both for end in one]
    assert wait_for(lambda: all(has_settled(end) for end in ends), WAIT_S)
    assert {end.state for end in ends} == {State.SUCCESS}
    for room, here in zip(rooms, blocks, strict=True):
        assert pair.there.has(room, range(BLOCKS_EACH), list(here))
    for end in ends:
        end.close()


def has_settled(end: Sender | Receiver) -> bool:
    return end.progress.ended and not end.holds_blocks


def objects() -> int:
    gc.collect()
    return sys.getallocatedblocks()


def test_a_thousand_handoffs_leave_no_more_than_a_hundred_did():
    numbers = RoomNumbers(5)
    with managers(replace(PATIENCE, silence_s=WAIT_S, transferring_s=WAIT_S)) as pair:
        for _ in range(100):
            hand_over(pair, [numbers.draw()])
        held, before = Held.now(), objects()
        for _ in range(836):
            hand_over(pair, [numbers.draw()])
        hand_over(pair, [numbers.draw() for _ in range(64)])
        assert objects() - before < OBJECTS_MORE_MOST
        wait_for(lambda: not Held.now().beyond(held))  # a lease may be on its way
        assert Held.now().beyond(held) == []
        assert pair.prefill.describe() == pair.decode.describe() == []
        stats = pair.decode.stats()
        assert (stats["succeeded"], stats["limbo_blocks"], stats["links"]) == (1_000, 0, 1)
