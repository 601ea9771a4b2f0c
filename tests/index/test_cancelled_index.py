"""Goal: no index process is left when its start or end is cancelled; none who asks is hurt."""

import asyncio
import os
import signal

from kvstore.index import process
from kvstore.index.control import Expect, IndexSettings, SourceBounds
from kvstore.index.process import IndexProcess
from tests.loops import eventually, in_loop

SETTINGS = IndexSettings(4096, SourceBounds(replay_s=5.0, verify_s=0.2, foreign_blocks=1000))


@in_loop
async def test_a_start_that_is_cancelled_leaves_no_process(monkeypatch):
    started: list[asyncio.subprocess.Process] = []
    connecting = asyncio.Event()
    spawn, connect = asyncio.create_subprocess_exec, asyncio.open_connection

    async def spawned(*args, **options):
        started.append(await spawn(*args, **options))
        return started[-1]

    async def connected(**options):
        connecting.set()
        await asyncio.sleep(0)  # a moment in which the start may be cancelled
        return await connect(**options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", spawned)
    monkeypatch.setattr(asyncio, "open_connection", connected)
    task = asyncio.create_task(IndexProcess(SETTINGS).run())
    async with asyncio.timeout(50):
        await connecting.wait()
        task.cancel()
        await asyncio.wait([task])
        assert all(process.returncode is not None for process in started)


@in_loop
async def test_a_start_that_is_cancelled_while_the_process_is_made_leaves_none(monkeypatch):
    started: list[asyncio.subprocess.Process] = []
    spawning, go_on = asyncio.Event(), asyncio.Event()
    spawn = asyncio.create_subprocess_exec

    async def spawned(*args, **options):
        started.append(await spawn(*args, **options))
        spawning.set()
        await go_on.wait()
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", spawned)
    task = asyncio.create_task(IndexProcess(SETTINGS).run())
    async with asyncio.timeout(50):
        await spawning.wait()
        task.cancel()
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.wait([task])
        assert task.cancelled()
        assert [process.returncode is not None for process in started] == [True]


@in_loop
async def test_an_end_that_is_cancelled_kills_a_process_that_does_not_end(monkeypatch):
    index = IndexProcess(SETTINGS)
    async with asyncio.timeout(50):
        task = asyncio.create_task(index.run())
        await eventually(lambda: index.present().table is not None)
        assert index._life is not None
        child = index._life._process
        os.kill(child.pid, signal.SIGSTOP)
        monkeypatch.setattr(process, "_END_S", 30.0)
        task.cancel()
        await eventually(lambda: index._life is None)
        task.cancel()
        await asyncio.wait([task])
        assert child.returncode == -signal.SIGKILL


@in_loop
async def test_a_process_that_has_ended_hurts_nobody_before_its_end_is_noticed():
    index = IndexProcess(SETTINGS)
    async with asyncio.timeout(50):
        task = asyncio.create_task(index.run())
        await eventually(lambda: index.present().table is not None)
        life = index._life
        assert life is not None
        task.cancel()
        await asyncio.wait([task])
        await eventually(lambda: "closed=True" in repr(life._writer.transport))

    index._life = life  # the moment in which only its transport knows
    index.expect(Expect("node/n", b"", 0, 0), life.table)
    index.aside(b"a question")
    index.unfollow("node/n")

    assert index.fault_counts["backlog"] == 1
