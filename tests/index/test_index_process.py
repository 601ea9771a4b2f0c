"""Goal: whatever happens to the index's process, who reads the index is right, or told."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from conductor.front.metrics import index_gauges
from kvstore.events.publisher import EventPublisher
from kvstore.index import process
from kvstore.index.control import Expect, IndexSettings, SourceBounds
from kvstore.index.directory import PageHolder
from kvstore.index.feed import EXPECTED
from kvstore.index.process import IndexProcess
from kvstore.index.runs import PartNeed, PrefixNeeds
from kvstore.index.scope import key_chains, scope_seed
from kvstore.index.table import IndexReader
from kvstore.protocol.page import page_keys
from tests.conftest import WaitUntil
from tests.index.publishers import KEYS, SPACE, node, stored, usable
from tests.loops import eventually, in_loop

LOOPBACK = "tcp://127.0.0.1:*"
SETTINGS = IndexSettings(4096, SourceBounds(replay_s=5.0, verify_s=0.2, foreign_blocks=1000))


def prefix(index: IndexProcess) -> int:
    """Usable pages of the keys; -1 if nothing is known."""
    return prefix_and_entries(index)[0]


def prefix_and_entries(index: IndexProcess) -> tuple[int, int]:
    """Usable pages of the keys, -1 if nothing is known, and the pages that the report tells of."""
    table, report = index.present()
    if table is None:
        return -1, report.entries
    seed = scope_seed(table.secret, "keys", SPACE)
    return usable(table, "node/n", key_chains(KEYS.packed, seed)), report.entries


def pid_of(index: IndexProcess) -> int:
    assert index._life is not None
    return index._life._process.pid


@asynccontextmanager
async def running(*indexes: IndexProcess) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(index.run()) for index in indexes]
    try:
        async with asyncio.timeout(50):
            yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@asynccontextmanager
async def knowing(index: IndexProcess) -> AsyncIterator[EventPublisher]:
    """The index runs, and knows and reports five pages of a publisher that it follows."""
    with EventPublisher(LOOPBACK, LOOPBACK, topic=b"kvstore@n@aa") as publisher:
        async with running(index):
            index.follow(node(publisher.bound_endpoint, publisher.bound_replay_endpoint))
            publisher.publish([stored(KEYS[:5])])
            await eventually(lambda: prefix(index) == 5)
            await eventually(lambda: index.present().report.entries == 5)
            yield publisher


@in_loop
async def test_an_index_in_a_process_of_its_own_is_read_without_asking_it() -> None:
    index = IndexProcess(SETTINGS)
    assert index.present().table is None
    async with knowing(index):
        known = index.present().worker("node/n")
        assert known is not None
        assert (known.current, known.pages) == (True, {"CPU": 5})
        index.unfollow("node/n")
        await eventually(lambda: prefix(index) == 0)
        await eventually(lambda: index.present().worker("node/n") is None)
    assert index.restarts == 0


async def seen_of_expected(index: IndexProcess, number: int, spell_s: float) -> list[int]:
    """Expect three pages for so long; how many counted, look by look until their time was over."""
    table, seen = index.present().table, list[int]()
    assert table is not None
    keys = page_keys(np.arange(64) + 64 * number, 4)
    chains = key_chains(keys.packed, scope_seed(table.secret, "keys", SPACE))
    needs = PrefixNeeds([[PartNeed([PageHolder("engine/e", EXPECTED, "", 0)])]])
    now = process.time.monotonic_ns()
    until_ns = now + int(spell_s * 1e9)
    index.expect(Expect("engine/e", chains[:3].tobytes(), now, until_ns), table)

    def over() -> bool:
        seen.append(int(table.match([chains], needs)[0, 0]))
        is_over = process.time.monotonic_ns() >= until_ns
        assert is_over or seen[-1] == max(seen), "what counts does so until then"
        return is_over and not seen[-1]

    await eventually(over)
    return seen


@in_loop
async def test_expected_pages_count_until_their_time_is_over() -> None:
    index = IndexProcess(SETTINGS)
    async with running(index):
        await eventually(lambda: index.present().table is not None)
        for number, spell_s in enumerate((0.6, 3.0, 9.0)):  # a stall may be longer than a spell
            seen = await seen_of_expected(index, number, spell_s)
            if max(seen) == 3:
                break
        assert max(seen) == 3


@in_loop
async def test_a_killed_index_is_started_again_and_its_old_table_read_until_it_has_caught_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "STALE_S", 60.0)
    index = IndexProcess(SETTINGS)
    async with knowing(index) as publisher:
        before, seen = pid_of(index), []
        os.kill(before, signal.SIGKILL)

        def again() -> bool:
            seen.append(prefix(index))
            return index.restarts == 1 and index._life is not None and index._life.begun

        await eventually(again)
        publisher.publish([stored(KEYS[5:7])])
        await eventually(lambda: prefix(index) == 7)
        assert set(seen) == {5}, "at no time was anything else known"
        assert pid_of(index) != before


@in_loop
async def test_an_index_that_is_killed_under_load_knows_everything_in_the_end() -> None:
    index, keys = IndexProcess(SETTINGS), page_keys(np.arange(8_000), 4)
    told = 0
    with EventPublisher(LOOPBACK, LOOPBACK, topic=b"kvstore@n@aa") as publisher:

        def usable_now() -> int:
            """Pages that are known while one more is published; -1 if nothing is known."""
            nonlocal told
            if told < len(keys):
                publisher.publish([stored(keys[told : told + 1])])
                told += 1
            table, _ = index.present()
            if table is None:
                return -1
            chains = key_chains(keys.packed, scope_seed(table.secret, "keys", SPACE))
            return usable(table, "node/n", chains)

        async with running(index):
            index.follow(node(publisher.bound_endpoint, publisher.bound_replay_endpoint))
            for restarts in range(2):
                await eventually(lambda: usable_now() > 0)
                known = usable_now()
                assert known > 0
                os.kill(pid_of(index), signal.SIGKILL)
                await eventually(
                    lambda known=known, restarts=restarts: (
                        usable_now() >= known
                        and index.restarts > restarts
                        and index._life is not None
                        and index._former is None
                    )
                )
            await eventually(lambda: usable_now() == told)
    assert index.restarts == 2


async def suspend(index: IndexProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop its process, which is ended after 2 s without a sign of life; not before by a stall."""
    monkeypatch.setattr(process, "HUNG_S", 2.0)
    report = index.present().report
    await eventually(lambda: index.present().report is not report, "the next one has 2 s")
    os.kill(pid_of(index), signal.SIGSTOP)


@in_loop
async def test_a_stopped_index_counts_for_nothing_and_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "STALE_S", 0.5)
    index = IndexProcess(SETTINGS)
    async with knowing(index):
        stopped = pid_of(index)
        os.kill(stopped, signal.SIGSTOP)
        await eventually(lambda: prefix(index) == -1, "its table is not believed")
        assert pid_of(index) == stopped, "long before it is ended"
        os.kill(stopped, signal.SIGCONT)
        await suspend(index, monkeypatch)
        await eventually(lambda: prefix(index) == -1)
        seen: set[int] = set()

        def again() -> bool:
            seen.add(prefix(index))
            return index.restarts == 1

        await eventually(again)
        assert seen == {-1}, "nor when the process was ended"
        with pytest.raises(ProcessLookupError):
            os.kill(stopped, 0)
        await eventually(lambda: prefix(index) == 5)


@in_loop
async def test_the_table_of_a_stopped_index_is_not_believed_again_when_it_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "STALE_S", 0.5)
    index, seen = IndexProcess(SETTINGS), set[int]()
    async with knowing(index) as publisher:
        await suspend(index, monkeypatch)
        publisher.close()  # so the next index never catches up
        await eventually(lambda: prefix(index) == -1)

        def again() -> bool:
            seen.add(prefix(index))
            return index.restarts == 1 and index._life is not None and index._life.begun

        await eventually(again)
        assert seen <= {-1, 0}


@in_loop
async def test_an_index_is_not_killed_because_its_reader_stood_still(
    monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    index = IndexProcess(SETTINGS)
    async with knowing(index):
        monkeypatch.setattr(process, "HUNG_S", 1.0)
        monkeypatch.setattr(process, "_LAST_S", 20.0)
        report = index.present().report
        await eventually(lambda: index.present().report is not report, "the next one has 1 s")
        table, report = index.present()
        assert table is not None
        until_ns = time.monotonic_ns() + 2_000_000_000
        wait_until(lambda: time.monotonic_ns() - table.age_ns(time.monotonic_ns()) > until_ns)
        await eventually(lambda: index.present().report is not report)
        assert (index.restarts, prefix(index)) == (0, 5)


class RacingClock:
    """A clock on which a table grows stale between any two looks at it."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self._looks = 0

    def monotonic_ns(self) -> int:
        self._looks += 1
        return time.monotonic_ns() + int((self._looks - 1) * (process.STALE_S + 1) * 1e9)


async def replaced(index: IndexProcess, publisher: EventPublisher) -> IndexReader:
    """The table of a process that was killed, which is still read; the next one has begun."""
    before, _ = index.present()
    assert before is not None
    os.kill(pid_of(index), signal.SIGKILL)
    await eventually(lambda: index._former is not None)
    publisher.close()  # so the next index never catches up
    await eventually(lambda: index._life is not None and index._life.begun)
    assert index.present().table is before
    return before


@in_loop
async def test_table_and_report_are_of_one_process_though_the_former_table_grows_stale_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "STALE_S", 60.0)
    index = IndexProcess(SETTINGS)
    async with knowing(index) as publisher:
        await replaced(index, publisher)
        assert prefix_and_entries(index) == (5, 5)
        with monkeypatch.context() as racing:
            racing.setattr(process, "time", RacingClock())
            assert prefix_and_entries(index) == (5, 5), "both were still read when it was asked"
            assert prefix_and_entries(index) == (-1, 0)
        assert prefix_and_entries(index) == (0, 0), "what was stale is not read again"


@in_loop
async def test_chain_values_of_the_former_table_are_not_expected_in_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "STALE_S", 60.0)
    index = IndexProcess(SETTINGS)
    async with knowing(index) as publisher:
        former = await replaced(index, publisher)
        monkeypatch.setattr(process, "STALE_S", 5.0)
        now = process.time.monotonic_ns()
        with monkeypatch.context() as racing:
            racing.setattr(process, "time", RacingClock())
            index.present()
            index.present()
        table, _ = index.present()
        assert table is not None
        assert table is not former
        index.expect(Expect("engine/e", bytes([1]) * 8, now, now + 600_000_000_000), former)
        assert index.fault_counts == {"ended": 1, "backlog": 1}
        assert index_gauges(index)["index_faults"] == {("ended",): 1, ("backlog",): 1}
        index.expect(Expect("engine/e", bytes([2]) * 16, now, now + 600_000_000_000), table)
        await eventually(lambda: index.present().report.expected > 0)
        assert index.present().report.expected == 2


@in_loop
async def test_nothing_more_is_expected_of_a_worker_that_is_forgotten_though_never_followed() -> (
    None
):
    index = IndexProcess(SETTINGS)
    async with running(index):
        await eventually(lambda: index.present().table is not None)
        table, _ = index.present()
        assert table is not None
        now = process.time.monotonic_ns()
        index.expect(Expect("engine/e", bytes([1]) * 8, now, now + 600_000_000_000), table)
        await eventually(lambda: index.present().report.expected == 1)
        wrong = Expect("engine/e", bytes(range(16)), now, now + 600_000_000_000)
        index.expect(wrong, table)
        await eventually(lambda: index.present().report.expected == 3)
        index.unexpect(wrong)
        await eventually(lambda: index.present().report.expected == 1)
        index.unfollow("engine/e")
        await eventually(lambda: index.present().report.expected == 0)
        await eventually(lambda: index.present().report.entries == 0)


class Immortal:
    """A process that the kernel does not let end."""

    pid = 1

    def __init__(self) -> None:
        self.killed = 0

    async def wait(self) -> None:
        await asyncio.Event().wait()

    def kill(self) -> None:
        self.killed += 1


@in_loop
async def test_a_process_that_does_not_even_end_when_killed_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "_END_S", 0.02)
    index = IndexProcess(SETTINGS)
    async with running(index):
        await eventually(lambda: index.present().table is not None)
        assert index._life is not None
        immortal, real = Immortal(), index._life._process
        index._life._process = immortal  # type: ignore[assignment]
        real.kill()
        await eventually(lambda: index.restarts == 1)
        await real.wait()
    assert immortal.killed == 1
    assert "is still running" in caplog.text


@in_loop
async def test_two_on_one_machine_do_not_meet() -> None:
    one, other = IndexProcess(SETTINGS), IndexProcess(SETTINGS)
    with EventPublisher(LOOPBACK, LOOPBACK, topic=b"kvstore@n@aa") as publisher:
        async with running(one, other):
            one.follow(node(publisher.bound_endpoint, publisher.bound_replay_endpoint))
            publisher.publish([stored(KEYS[:5])])
            await eventually(lambda: prefix(one) == 5 and prefix(other) == 0)


STARTS_ONE = """
import asyncio
from kvstore.index.control import IndexSettings, SourceBounds
from kvstore.index.process import IndexProcess

async def main():
    index = IndexProcess(IndexSettings(4096, SourceBounds(1.0, 1.0, 100)))
    running = asyncio.create_task(index.run())
    while index.present().table is None:
        await asyncio.sleep(0.01)
    print("child", index._life._process.pid, flush=True)
    await running

asyncio.run(main())
"""


def test_an_index_ends_with_the_process_that_started_it(spawn, wait_until):
    parent = spawn([sys.executable, "-c", STARTS_ONE], ready="child")
    child = int(parent.stdout.split()[-1])
    assert Path(f"/proc/{child}").exists()
    parent.kill()
    wait_until(lambda: not Path(f"/proc/{child}").exists(), what="the index process ends")
    assert not [name for name in os.listdir("/dev/shm") if "kvstore" in name]  # noqa: PTH208


def test_an_index_whose_starter_has_ended_already_ends_without_a_word(spawn):
    code = (
        "import os, runpy, socket, sys\n"
        "ours, theirs = socket.socketpair()\n"
        "ours.close()\n"
        "memory = os.memfd_create('test')\n"
        "sys.argv[1:] = [str(memory), str(theirs.detach())]\n"
        "runpy.run_module('kvstore.index.child', run_name='__main__')\n"
    )
    child = spawn([sys.executable, "-c", code])
    assert child.wait() == 0
    assert child.stderr == ""
