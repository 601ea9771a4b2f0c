"""Goal: whatever happens to the index or the Conductor, requests are served and nothing stays."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.cluster import LISTENING, script
from tests.conductor.fakes import OPERATE, FakeEngine, bearer
from tests.conftest import Process, Spawn
from tests.loops import in_loop

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]
PROMPT = list(range(400))
WAIT_S = 45.0
"""A stopped index is ended after 10 s, and its successor starts within 30 s."""
CLIENTS = 4


def start(spawn: Spawn, port: int = 0, *more: str) -> Process:
    """A Conductor that prefers prefixes and says how to reach it."""
    settings = [f"http.port={port}", f"http.operate_token={OPERATE}", "health.probe_s=0.2", *more]
    flags = [part for one in settings for part in ("--set", one)]
    return spawn([script("kvstore-conductor"), *flags], ready=LISTENING)


def index_of(conductor: Process) -> int:
    """Process id of its index; 0 = it has none now."""
    path = Path(f"/proc/{conductor.pid}/task/{conductor.pid}/children")
    for child in path.read_text().split():
        if b"kvstore.index.child" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    return 0


def is_gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def named_memory(pid: int) -> list[str]:
    """Shared memory of a process that others could find by a name."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [one for one in maps if "/dev/shm" in one and "(deleted)" not in one]


class Asking:
    """Clients of a Conductor that ask without a pause.

    Attributes:
        answered: requests that were answered rightly.
        wrong: other answers.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self.url = url
        self.answered = 0
        self.wrong: list[Any] = []
        self._number = 0

    async def register(self, *engines: FakeEngine) -> None:
        for engine in engines:
            body = {"id": engine.id, "role": engine.role, "url": engine.url}
            url, headers = f"{self.url}/v1/engines", bearer(OPERATE)
            async with self._session.post(url, json=body, headers=headers) as response:
                assert response.status == 201, await response.text()

    async def candidates(self) -> dict[str, int]:
        """Ask with the prompt: the usable tokens that each engine was thought to have."""
        self._number += 1
        name = f"seen-{self._number}"
        body = {"model": "m", "prompt": PROMPT}
        headers = {"X-Request-Id": name}
        async with self._session.post(
            f"{self.url}/v1/completions", json=body, headers=headers
        ) as response:
            assert response.status == 200, await response.text()
        async with self._session.get(f"{self.url}/v1/decisions/{name}") as response:
            [attempt] = (await response.json())["attempts"]
        return {one["engine"]: one["usable_tokens"] for one in attempt["candidates"]}

    async def metric(self, name: str) -> float:
        async with self._session.get(f"{self.url}/metrics") as response:
            text = await response.text()
        families = text_string_to_metric_families(text)
        found = [one.value for family in families for one in family.samples if one.name == name]
        return found[0]

    async def until(self, what: str, condition: Any) -> None:
        """Wait until an async condition is true."""
        try:
            async with asyncio.timeout(WAIT_S):
                while not await condition():
                    await asyncio.wait([asyncio.create_task(asyncio.Event().wait())], timeout=0.05)
        except TimeoutError:
            pytest.fail(f"not within {WAIT_S} s: {what}")

    @asynccontextmanager
    async def all_the_time(self) -> AsyncIterator[None]:
        """Clients in the background; all that they ask is answered rightly."""
        tasks = [asyncio.create_task(self._ask(one)) for one in range(CLIENTS)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert not self.wrong

    async def _ask(self, client: int) -> None:
        for turn in range(1_000_000):
            body = {"model": "m", "prompt": [client, turn, *PROMPT], "stream": turn % 2 == 0}
            async with self._session.post(f"{self.url}/v1/completions", json=body) as response:
                text = await response.text()
            whole = "[DONE]" in text if body["stream"] else "whole from" in text
            if response.status == 200 and whole:
                self.answered += 1
            else:
                self.wrong.append((response.status, text))

    async def more(self, count: int = 20) -> None:
        """Wait until so many more are answered."""
        before = self.answered
        await self.until(f"{count} more answers", lambda: _true(self.answered >= before + count))


async def _true(value: bool) -> bool:
    return value


@asynccontextmanager
async def two_engines() -> AsyncIterator[list[FakeEngine]]:
    engines = [FakeEngine(name, "mixed", max_running=64) for name in "ab"]
    try:
        for one in engines:
            await one.start()
        yield engines
    finally:
        for one in engines:
            await one.stop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@in_loop
async def test_without_its_index_the_front_serves_by_load_until_the_next_one_knows_more(
    number: signal.Signals, spawn: Spawn
) -> None:
    conductor = start(spawn)
    async with two_engines() as engines, aiohttp.ClientSession() as session:
        asking = Asking(session, conductor.ready.group(1))
        await asking.register(*engines)
        await asking.until("the index", lambda: _is(asking, "index_up", 1.0))
        async with asking.all_the_time():
            await asking.until("the prefix is known", lambda: _knows(asking))
            index = index_of(conductor)
            os.kill(index, number)
            if number is signal.SIGSTOP:
                await asking.until("it does not count", lambda: _is(asking, "index_up", 0.0))
                assert set((await asking.candidates()).values()) == {0}
                for one in engines:
                    one.requests.clear()
                await asking.more()
                assert all(one.requests for one in engines), "both, by load"
            await asking.until(
                "it is started again", lambda: _is(asking, "index_restarts_total", 1.0)
            )
            await asking.more()
            await asking.until("the next one", lambda: _is(asking, "index_up", 1.0))
            await asking.until("the prefix is known again", lambda: _knows(asking))
            assert is_gone(index)
        assert await asking.metric("kvstore_conductor_queue_length") == 0


async def _is(asking: Asking, name: str, value: float) -> bool:
    return await asking.metric(f"kvstore_conductor_{name}") == value


async def _knows(asking: Asking) -> bool:
    return max((await asking.candidates()).values()) == len(PROMPT)


@in_loop
async def test_a_killed_conductor_leaves_nothing_behind_and_is_started_again(
    spawn: Spawn,
) -> None:
    conductor = start(spawn)
    async with two_engines() as engines, aiohttp.ClientSession() as session:
        asking = Asking(session, conductor.ready.group(1))
        await asking.register(*engines)
        await asking.until("the prefix is known", lambda: _knows(asking))
        index = index_of(conductor)
        assert index
        assert not named_memory(conductor.pid) + named_memory(index)
        for one in engines:
            one.mid_gate.clear()
        body = {"model": "m", "prompt": PROMPT, "stream": True}
        async with session.post(f"{asking.url}/v1/completions", json=body) as response:
            await response.content.readuntil(b"\n\n")
            conductor.send_signal(signal.SIGKILL)
            conductor.wait()
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        await asking.until("its index has ended", lambda: _true(is_gone(index)))
        await asking.until(
            "the engines stop what nobody reads", lambda: _true(not any(e.running for e in engines))
        )
        for one in engines:
            one.mid_gate.set()

        port = int(asking.url.rpartition(":")[2])
        again = start(spawn, port)
        assert again.ready.group(1) == asking.url
        await asking.register(*engines)
        async with asking.all_the_time():
            await asking.more()
            await asking.until("the prefix is known again", lambda: _knows(asking))
        assert json.loads(await _text(session, f"{asking.url}/v1/index"))["restarts"] == 0


async def _text(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(url) as response:
        return await response.text()
