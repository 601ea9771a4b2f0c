"""Checks of handoffs over Mooncake between engines of several ranks; see ``..._program``."""

import os
import random
import signal
from itertools import count

from kvstore.handoff.ranks import RankPart
from kvstore.handoff.states import State
from tests.cluster_processes.handoff_mooncake_scene import PATIENCE, stop, until
from tests.handoff.ranked import BLOCKS, HEADS, LAYERS, Ranked, ranked, whole_of
from tests.handoff.ranked_states import RankStates, some_blocks
from tests.handoff.test_ranks import grid

STAGED = 1 << 20
"""More than the K and V of two prompts of this model."""
OLD, NEW = list(range(0, 20, 2)), list(range(40, 50))


def split(layers: int = 1, heads: int = 1) -> list[RankPart]:
    """So many pipeline stages of so many ranks."""
    return grid(
        list(range(0, LAYERS + 1, LAYERS // layers)), list(range(0, HEADS + 1, HEADS // heads)), 1
    )


def hand_over(
    engines: Ranked, room: int, here: list[int], there: list[int],
    states: tuple[RankStates, RankStates] | None = None,
) -> None:  # fmt: skip
    """A whole handoff, perhaps with state data; it succeeds at all ranks."""
    whole, chance = whole_of(room, len(here)), random.Random(room)
    blocks = some_blocks(len(here), chance) if states else {}
    senders, receivers = engines.begin(room, len(here))
    both = (*senders, *receivers)
    for receiver in receivers:
        receiver.announce(0, there, blocks)
    if states:
        states[0].send(senders, room, len(here), chance)
    engines.push(senders, whole, here)
    until(lambda: all(one.progress.ended for one in both))
    assert [one.failure for one in both] == [None] * len(both)
    assert engines.wrong(whole, there) == []
    if states:
        assert states[1].wrong(room, len(here), blocks) == []
        states[1].clear()
    until(lambda: not any(one.holds_blocks for one in both))
    for one in both:
        one.close()


def written(engines: Ranked) -> int:
    return sum(one.stats()["written_jobs"] for one in engines.prefill)


def kv_and_state_data_of_other_ranks_arrive_whole() -> None:
    shuffled = random.Random(3)
    for prefill, decode in ((split(layers=2), split()), (split(), split(heads=2))):
        states = RankStates(), RankStates()
        buffers = states[0].of, states[1].of
        with ranked(prefill, decode, PATIENCE, STAGED, buffers) as engines:
            for room in range(1, 5):
                blocks = [shuffled.sample(range(BLOCKS), 10) for _ in range(2)]
                hand_over(engines, room, *blocks, states)
            for one in engines.prefill:
                assert one.stats()["written_jobs"] > 0
                assert one.stats()["jobs_not_taken"] == 0


def nothing_lands_late_from_one_rank_while_the_other_has_drained() -> None:
    """One rank's engine is stopped in the middle of its writes, the other one answers an abort."""
    with ranked(split(heads=2), split(), PATIENCE, STAGED) as engines:
        hand_over(engines, 1, OLD, NEW)
        (decode,), (there,) = engines.decode, engines.there
        landing, writer = decode._engine, engines.prefill[0]._writes._writer
        first = landing._engine.process._process.pid
        stop(first)
        senders, (receiver,) = engines.begin(2, len(OLD))
        receiver.announce(0, OLD)
        whole = whole_of(2, len(OLD))
        engines.push(senders, whole, NEW)
        until(lambda: bool(writer._moving))
        writing = writer._mooncake._reader.process._process.pid
        stop(writing)
        os.kill(first, signal.SIGCONT)
        until(lambda: not engines.prefill[1]._writes._writer._moving)
        receiver.abort()
        until(lambda: not senders[1].holds_blocks)
        link = next(link for link in decode._core._rooms[2].legs if _rank(decode, link) == 1)
        until(lambda: decode._core._rooms[2].legs[link].drained)
        assert receiver.holds_blocks, "the other rank's writes are under way"
        next(iter(decode._links.values())).close()
        until(lambda: not receiver.holds_blocks)
        assert decode.stats()["engines_ended_for_limbo"] == 1
        receiver.close()
        there.planes[:, OLD] = 0xAB
        until(lambda: landing._place is not None)
        staged = landing._staged.buffer
        staged[:] = b"\xcd" * len(staged)
        os.kill(writing, signal.SIGCONT)
        until(lambda: not senders[0].holds_blocks)
        assert staged[:] == b"\xcd" * len(staged), "bytes came after the engine's end"
        before = written(engines)
        for room in count(3):
            hand_over(engines, room, NEW[:4], NEW[4:8])
            if written(engines) > before:
                break
            assert room < 300
        assert (there.planes[:, OLD] == 0xAB).all()


def _rank(decode, link) -> int:  # type: ignore[no-untyped-def]
    return int(decode._core._sources._all[link].rank)


def an_engine_of_one_rank_is_killed_while_others_write() -> None:
    """Decode's engine dies, or one rank of prefill's: all blocks come back, the next succeed."""
    with ranked(split(heads=2), split(heads=2), PATIENCE, STAGED) as engines:
        hand_over(engines, 1, OLD, NEW)
        for room, killed in enumerate((engines.decode, engines.prefill), 2):
            landing, writer = engines.decode[0]._engine, engines.prefill[0]._writes._writer
            until(lambda: writer._mooncake._attempts.up)  # noqa: B023
            stop(landing._engine.process._process.pid)
            senders, receivers = engines.begin(room, len(OLD))
            for receiver in receivers:
                receiver.announce(0, OLD)
            engines.push(senders, whole_of(room, len(OLD)), NEW)
            until(lambda: bool(writer._moving))  # noqa: B023
            child = landing if killed is engines.decode else writer._mooncake._reader
            process = child._engine.process if killed is engines.decode else child.process
            os.kill(process._process.pid, signal.SIGKILL)
            until(lambda: receivers[0].state == senders[0].state == State.FAILED)  # noqa: B023
            for one in (*senders, *receivers):
                one.abort()  # as the engine does when one rank has failed
            both = (*senders, *receivers)
            until(lambda: not any(one.holds_blocks for one in both))  # noqa: B023
            for one in both:
                one.close()
            until(lambda: all(one._engine._place is not None for one in engines.decode))
            hand_over(engines, 10 * room, OLD, NEW)


CHECKS = (
    kv_and_state_data_of_other_ranks_arrive_whole,
    nothing_lands_late_from_one_rank_while_the_other_has_drained,
    an_engine_of_one_rank_is_killed_while_others_write,
)
