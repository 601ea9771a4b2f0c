"""Streams whose engine falls silent, or whose client does not read: neither lasts for ever."""

import asyncio
import json
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest

from conductor.front.upstream import IdleDeadline
from tests.conductor.fakes import FakeEngine, serving, sse
from tests.loops import eventually, in_loop

SHORT = {"idle_s": 0.2}


class Clock:
    """Time as a test moves it, long before the loop's, so that what is due in it is due at once."""

    def __init__(self) -> None:
        self._now = 0.0
        self._timers: list[Timer] = []

    def time(self) -> float:
        return self._now

    def call_at(self, when: float, call: Callable[[], None]) -> "Timer":
        self._timers.append(Timer(when, call))
        return self._timers[-1]

    async def move(self, seconds: float) -> None:
        """Later; then the loop turns a few times."""
        self._now += seconds
        due = [one for one in self._timers if one.due <= self._now]
        self._timers = [one for one in self._timers if one not in due]
        for one in due:
            one.call()
        for _ in range(5):
            await asyncio.sleep(0)


class Timer:
    """One call of a clock."""

    def __init__(self, due: float, call: Callable[[], None]) -> None:
        self.due = due
        self.call = call

    def when(self) -> float:
        return self.due

    def cancel(self) -> None:
        self.call = lambda: None


@in_loop
async def test_an_engine_that_falls_silent_in_a_stream_is_given_up() -> None:
    engine = FakeEngine("e", "mixed")
    async with serving(engine, deadline=SHORT) as client:
        engine.mid_gate.clear()
        status, answer, headers = await client.complete(stream=True)
        assert status == 200
        assert sse(answer)[-1]["error"]["code"] == "engine_failed"
        decision = await client.decision(headers["X-Request-Id"])
        assert decision["outcome"] == "broken"
        assert "no answer in time" in decision["detail"]
        await eventually(lambda: engine.aborted == 1 or engine.running == 0)


@in_loop
async def test_a_client_that_does_not_read_is_given_up() -> None:
    engine = FakeEngine("e", "mixed")
    engine.id = "x" * (1 << 20)  # a token has a megabyte
    engine.tokens = 64
    body = json.dumps({"model": "m", "prompt": "hi", "stream": True}).encode()
    engine.described["id"] = "e"
    async with serving(deadline={"idle_s": 3.0}) as client:  # the engine has to keep it
        await engine.start()
        try:
            entry = {"id": "e", "role": "mixed", "url": engine.url}
            assert (await client.operate("/v1/engines", entry))[0] == 201
            parts = urlsplit(client.url)
            with socket.create_connection((parts.hostname, parts.port)) as silent:
                head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
                silent.sendall(f"{head}\r\nX-Request-Id: slow\r\n\r\n".encode() + body)
                await eventually(lambda: engine.requests)
                await eventually(lambda: client.conductor.proxy.active == 0, "it was given up")
            decision = await client.decision("slow")
            assert decision["outcome"] == "client_gone"
            assert client.conductor.registry.get("e").health.failures == 0  # type: ignore[union-attr]
        finally:
            await engine.stop()


@pytest.mark.parametrize("reads", ["at once", "slowly"])
@in_loop
async def test_nothing_is_learned_of_an_engine_from_a_client_that_reads_slowly(reads: str) -> None:
    loop = asyncio.get_running_loop()
    engine = FakeEngine("e", "mixed", hardware="cpu", shape="reference-tiny")
    engine.like_openai = True
    async with serving(engine) as client:
        if reads == "slowly":
            engine.id, engine.tokens = "x" * (1 << 18), 64  # more than sockets hold
        body = {"model": "m", "prompt": list(range(9)), "stream": True}
        async with client.session.post(f"{client.url}/v1/completions", json=body) as answer:
            async for _ in answer.content.iter_chunked(1 << 20):
                until = loop.time() + (0.1 if reads == "slowly" else 0.0)
                await eventually(lambda: loop.time() > until)  # noqa: B023
        await eventually(lambda: client.conductor.proxy.active == 0)
        dispatcher = client.conductor.proxy._parts.dispatcher
        [info] = [one.info for one in client.conductor.registry]
        assert dispatcher.loads.costs(info).step_fit.count == (reads == "at once")
        assert dispatcher.admission.lengths.gauges()["output_tokens_bias"], "its length is known"
        [attempt] = (await client.decision(answer.headers["X-Request-Id"]))["attempts"]
        assert (attempt["tbt_s"] is not None) == (reads == "at once")


@in_loop
async def test_a_deadline_knows_how_long_was_waited_for_what() -> None:
    loop = asyncio.get_running_loop()
    async with IdleDeadline() as idle:
        idle.wait("long", 60.0)
        until = loop.time() + 0.05
        await eventually(lambda: loop.time() > until)
        idle.wait("short", 60.0)
        idle.wait("long", 60.0)
        until = loop.time() + 0.05
        await eventually(lambda: loop.time() > until)
    assert idle.waited_s["long"] > 0.1
    assert idle.waited_s["short"] < 0.05


@in_loop
async def test_a_deadline_passes_when_it_was_not_moved_and_not_before() -> None:
    clock, pieces = Clock(), 0

    async def moves() -> None:
        nonlocal pieces
        async with IdleDeadline() as idle:
            idle._loop = clock  # type: ignore[assignment]
            while pieces < 8:
                idle.wait("a piece", 1.0)
                await clock.move(0.4)
                pieces += 1
            await clock.move(0.5)
            pieces += 1
            await clock.move(0.2)
            pieces += 1

    with pytest.raises(TimeoutError):
        await moves()
    assert pieces == 9, "1.1 s after the last one, and not before"

    async def waits() -> None:
        async with IdleDeadline() as idle:
            idle.wait("long", 600.0)
            idle.wait("short", 0.01)
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await waits()


@in_loop
async def test_a_piece_of_a_stream_resumes_few_coroutines() -> None:
    engine = FakeEngine("e", "mixed")
    engine.mid_gate.clear()
    async with serving(engine) as client:
        asked = asyncio.create_task(
            client.session.post(
                f"{client.url}/v1/completions", json={"model": "m", "prompt": "hi", "stream": True}
            )
        )
        answer = await asked
        await answer.content.readany()
        chains = [_awaited(task.get_coro()) for task in asyncio.all_tasks()]
        [streaming] = [chain for chain in chains if "Relay._stream" in chain]
        assert streaming.index("Relay._stream") <= 1, streaming
        engine.mid_gate.set()
        await answer.read()
        answer.close()


def _awaited(coroutine: object) -> list[str]:
    """Names of a coroutine, of what it waits for, and so on."""
    found = []
    while (name := getattr(coroutine, "__qualname__", None)) is not None:
        found.append(name)
        coroutine = getattr(coroutine, "cr_await", None)
    return found
