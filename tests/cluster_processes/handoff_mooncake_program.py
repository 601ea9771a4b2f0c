"""One check of handoffs over Mooncake, run as a program in a network of its own.

``python -m tests.cluster_processes.handoff_mooncake_program CHECK``: one of the functions below.
"""

import os
import signal
import sys
from pathlib import Path

import pytest

from kvstore.handoff import mooncake
from kvstore.handoff.mooncake import MooncakeLanding, MooncakeWriter
from kvstore.handoff.places import unpack_ranges
from kvstore.handoff.prefill import PrefillManager
from kvstore.handoff.registry import HandoffRegistry
from kvstore.handoff.shared_memory import SharedMemory
from kvstore.handoff.states import FailureCode, State
from kvstore.protocol.errors import ConfigError
from tests.cluster_processes import handoff_mooncake_ranks as of_ranks
from tests.cluster_processes.handoff_mooncake_scene import (
    NEW,
    OLD,
    PATIENCE,
    SIZE,
    Scene,
    say,
    side,
    stop,
    until,
)
from tests.handoff.pair import (
    BLOCK_TOKENS,
    LAYERS,
    SECRET,
    SPACE,
    Memory,
    push_all,
)


def kv_go_over_mooncake_and_aux_over_the_link() -> None:
    scene = Scene()
    for room in range(1, 4):
        scene.push(room, OLD, NEW)
        assert scene.written() == room * 64 * 2 * LAYERS
    scattered = [3, 99, 7, 8, 9, 41, 12, 11]
    scene.push(4, [5, 6, 7, 9, 1, 2, 3, 4], scattered)
    assert scene.decode.stats()["succeeded"] == 4
    assert "failed_digest" not in scene.decode.stats()
    scene.close()


def an_abort_that_is_answered_costs_no_engine() -> None:
    scene = Scene()
    scene.push(1, [0], [0])
    engine = scene.engine_pid()
    other, others = scene.begin(2, NEW)
    sender, receiver = scene.begin(3, OLD)
    scene.here.write(3, range(1), range(64), OLD)
    sender.send(range(1), range(64), OLD)
    receiver.abort()
    until(lambda: not (sender.holds_blocks or receiver.holds_blocks))
    push_all(other, scene.here, NEW)
    until(lambda: others.state == State.SUCCESS)
    assert scene.there.has(2, range(64), NEW)
    assert scene.engine_pid() == engine
    assert scene.decode.stats()["limbo_blocks"] == 0
    scene.close()


def nothing_lands_after_decode_has_replaced_its_engine() -> None:
    """Prefill's engine is stopped in the middle of writes, and goes on after the replacement."""
    scene = Scene()
    scene.push(1, [0], [0])
    first = scene.engine_pid()
    stop(first)  # what is written now waits in sockets on both sides
    sender, receiver = scene.begin(2, OLD)
    scene.here.write(2, range(LAYERS), range(64), OLD)
    sender.send(range(LAYERS), range(64), OLD)
    until(lambda: bool(scene.writer._moving))
    writing = scene.writer_pid()
    stop(writing)
    os.kill(first, signal.SIGCONT)
    receiver.abort()
    link = next(iter(scene.decode._links.values()))
    assert receiver.holds_blocks, "prefill has not drained it, and cannot"
    link.close()  # as when prefill's process is stopped: the link is settled, not the writes
    until(lambda: scene.decode.stats().get("engines_ended_for_limbo", 0) == 1)
    until(lambda: not receiver.holds_blocks)
    receiver.close()
    assert not scene.there.has(2, range(64), OLD), "it was not in the middle"
    assert not Path(f"/proc/{first}").exists()
    scene.there.planes[:, OLD] = 0xAB  # the blocks are another request's
    os.kill(writing, signal.SIGCONT)
    until(lambda: not sender.holds_blocks)
    sender.close()
    until(lambda: scene.landing._place is not None)
    number = 3
    written = scene.written()
    while scene.written() == written:  # prefill's engine and decode's are used again
        scene.push(number, NEW[:2], NEW[:2])
        number += 1
        assert number < 500
    assert (scene.there.planes[:, OLD] == 0xAB).all(), "bytes came after the engine's end"
    scene.close()


def a_write_that_is_late_fails_its_handoff_and_its_blocks_come_back() -> None:
    scene = Scene()
    scene.push(1, [0], [0])
    stopped = scene.engine_pid()
    stop(stopped)
    sender, receiver = scene.begin(2, OLD)
    scene.here.write(2, range(LAYERS), range(64), OLD)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(mooncake, "WRITE_S", 1.0)
        sender.send(range(LAYERS), range(64), OLD)
        until(lambda: receiver.state == sender.state == State.FAILED)
    assert receiver.failure is not None
    assert receiver.failure.code == FailureCode.WRITE
    until(lambda: not (sender.holds_blocks or receiver.holds_blocks))
    assert not Path(f"/proc/{stopped}").exists()
    assert scene.decode.stats()["engines_ended_for_limbo"] == 1
    scene.push(3, NEW, NEW)
    scene.close()


def the_others_of_an_engine_in_doubt_end_first_and_new_ones_go_over_the_link() -> None:
    scene = Scene()
    scene.push(1, [0], [0])
    engine = scene.engine_pid()
    other, others = scene.begin(2, NEW[:8])
    sender, receiver = scene.begin(3, OLD[:8])
    until(lambda: other.state == sender.state == State.WAITING_FOR_INPUT)
    scene.decode.act(lambda core, now: core._engines.doubt(3) or [])
    receiver.abort()
    until(lambda: not sender.holds_blocks)
    before = scene.written()
    scene.push(4, OLD[20:22], OLD[20:22])
    assert scene.written() == before, "it was announced for an engine that will end"
    assert receiver.holds_blocks
    push_all(other, scene.here, NEW[:8])
    until(lambda: others.state == State.SUCCESS)
    assert scene.there.has(2, range(8), NEW[:8])
    assert scene.written() > before
    until(lambda: not receiver.holds_blocks)
    until(lambda: not Path(f"/proc/{engine}").exists())
    scene.close()


def engine_of_decode_is_killed() -> None:
    scene = Scene()
    scene.push(1, [0], [0])
    sender, receiver = scene.begin(2, OLD)
    scene.here.write(2, range(1), range(64), OLD)
    sender.send(range(1), range(64), OLD)
    until(lambda: sender.progress.moved_bytes > 0)
    os.kill(scene.engine_pid(), signal.SIGKILL)
    until(lambda: receiver.state == sender.state == State.FAILED)
    assert receiver.failure is not None
    assert receiver.failure.code in (FailureCode.ENGINE_ENDED, FailureCode.WRITE)
    until(lambda: not (sender.holds_blocks or receiver.holds_blocks))
    until(lambda: scene.landing._place is not None)
    scene.push(3, NEW, NEW)
    scene.close()


def engine_of_prefill_is_killed() -> None:
    scene = Scene()
    scene.push(1, [0], [0])
    stop(scene.engine_pid())
    sender, receiver = scene.begin(2, OLD)
    scene.here.write(2, range(LAYERS), range(64), OLD)
    sender.send(range(LAYERS), range(64), OLD)
    until(lambda: bool(scene.writer._moving))
    os.kill(scene.writer_pid(), signal.SIGKILL)
    until(lambda: receiver.state == sender.state == State.FAILED)
    assert receiver.failure is not None
    assert receiver.failure.code == FailureCode.WRITE
    until(lambda: not (sender.holds_blocks or receiver.holds_blocks))
    assert scene.decode.stats()["engines_ended_for_limbo"] == 1
    scene.push(3, NEW, NEW)
    scene.close()


def prefill_is_ended_in_the_middle_of_writes(number: signal.Signals) -> None:
    scene = Scene()
    scene.push(1, [0], [0])
    first = scene.engine_pid()
    with side("prefill") as (process, (url, writing)):
        stop(first)
        receiver = scene.decode.receiver(2, url, 64 * BLOCK_TOKENS)
        receiver.announce(0, OLD)
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        stop(int(writing))
        process.send_signal(number)
        os.kill(first, signal.SIGCONT)
        until(lambda: receiver.state == State.FAILED)
        assert receiver.failure is not None
        silent = FailureCode.PEER_SILENT, FailureCode.PEER_CLOSED
        assert receiver.failure.code == silent[number is signal.SIGKILL]
        until(lambda: not receiver.holds_blocks)
        assert not Path(f"/proc/{first}").exists()
        scene.there.planes[:, OLD] = 0xAB
        os.kill(int(writing), signal.SIGCONT)
        until(lambda: scene.landing._place is not None)
        scene.push(3, NEW, NEW)
        assert (scene.there.planes[:, OLD] == 0xAB).all(), "bytes came after the engine's end"
    scene.close()


def prefill_is_killed_in_the_middle_of_writes() -> None:
    prefill_is_ended_in_the_middle_of_writes(signal.SIGKILL)


def prefill_is_stopped_in_the_middle_of_writes() -> None:
    prefill_is_ended_in_the_middle_of_writes(signal.SIGSTOP)


def decode_is_killed_in_the_middle_of_writes() -> None:
    scene = Scene()
    scene.push(1, [0], [0])
    with side("decode", scene.registry.url) as (process, (engine,)):
        sender = scene.prefill.sender(2, 64 * BLOCK_TOKENS)
        until(lambda: sender.state == State.WAITING_FOR_INPUT)
        stop(int(engine))
        scene.here.write(2, range(LAYERS), range(64), OLD)
        sender.send(range(LAYERS), range(64), OLD)
        until(lambda: bool(scene.writer._moving))
        process.kill()
        until(lambda: sender.state == State.FAILED)
        assert sender.holds_blocks, "they are being read"
        os.kill(int(engine), signal.SIGCONT)
        until(lambda: not sender.holds_blocks)
        until(lambda: not Path(f"/proc/{engine}/maps").exists())
    scene.push(3, NEW, NEW)
    scene.close()


def both_sides_close_in_the_middle() -> None:
    scene = Scene()
    scene.push(1, [0], [0])
    stop(scene.engine_pid())
    sender, receiver = scene.begin(2, OLD)
    scene.here.write(2, range(LAYERS), range(64), OLD)
    sender.send(range(LAYERS), range(64), OLD)
    until(lambda: bool(scene.writer._moving))
    scene.close()
    assert sender.state == receiver.state == State.FAILED
    assert not sender.holds_blocks
    assert not receiver.holds_blocks


def a_flipped_byte_is_found() -> None:
    """Bytes at decode that are others than prefill's are never counted."""
    scene = Scene()
    scene.push(1, [0], [0])
    sender, receiver = scene.begin(2, OLD[:4])
    arriving = scene.decode._core.arriving

    def flipped(link, head, now_ns):  # type: ignore[no-untyped-def]
        if any(place.plane == 0 for place in unpack_ranges(head.ranges, head.digests)):
            scene.there.planes[0, OLD[2], 100] ^= 1
        return arriving(link, head, now_ns)

    scene.decode._core.arriving = flipped  # type: ignore[method-assign]
    push_all(sender, scene.here, OLD[:4])
    until(lambda: receiver.state == State.FAILED)
    assert receiver.failure is not None
    assert receiver.failure.code == FailureCode.DIGEST
    until(lambda: not receiver.holds_blocks)
    scene.close()


def a_prefill_without_mooncake_pushes_over_the_link() -> None:
    scene = Scene()
    here = Memory()
    registry = HandoffRegistry("127.0.0.1", 0, SECRET)
    prefill = PrefillManager(here.pool, SPACE, SECRET, registry=registry.url, patience=PATIENCE)
    receiver = scene.decode.receiver(1, registry.url, 4 * BLOCK_TOKENS)
    receiver.announce(0, OLD[:4])
    push_all(prefill.sender(1, 4 * BLOCK_TOKENS), here, OLD[:4])
    until(lambda: receiver.state == State.SUCCESS)
    assert scene.there.has(1, range(4), OLD[:4])
    prefill.close()
    registry.close()
    scene.close()


def rdma_without_a_device_is_refused() -> None:
    shared = SharedMemory(SIZE)
    with pytest.raises(ConfigError, match="no device"):
        MooncakeWriter(shared)
    with pytest.raises(ConfigError, match="no device"):
        MooncakeLanding(shared, Memory(shared=shared).starts)
    shared.close()


CHECKS = (
    kv_go_over_mooncake_and_aux_over_the_link,
    an_abort_that_is_answered_costs_no_engine,
    nothing_lands_after_decode_has_replaced_its_engine,
    a_write_that_is_late_fails_its_handoff_and_its_blocks_come_back,
    the_others_of_an_engine_in_doubt_end_first_and_new_ones_go_over_the_link,
    engine_of_prefill_is_killed,
    prefill_is_killed_in_the_middle_of_writes,
    prefill_is_stopped_in_the_middle_of_writes,
    decode_is_killed_in_the_middle_of_writes,
    engine_of_decode_is_killed,
    both_sides_close_in_the_middle,
    a_flipped_byte_is_found,
    a_prefill_without_mooncake_pushes_over_the_link,
    rdma_without_a_device_is_refused,
    *of_ranks.CHECKS,
)

WITH_THE_WHEEL = (CHECKS[0], CHECKS[2], *CHECKS[5:9], *CHECKS[13:])
"""The others do not depend on how Mooncake behaves: a stand-in is enough."""

if __name__ == "__main__":
    {check.__name__: check for check in CHECKS}[sys.argv[1]]()
    say("kept")
