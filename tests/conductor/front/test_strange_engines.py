"""Goal: whatever an engine answers costs that engine a try, and the Conductor nothing."""

import asyncio
import contextlib
import gzip
import json
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from conductor.config import DeadlineConfig
from conductor.front import upstream as upstreams
from conductor.front.upstream import SMALL_ANSWER_BYTES_MAX, EngineError, Upstream
from tests.conductor.fakes import OPERATE, FakeEngine, serving
from tests.conductor.front.test_front import END, raw
from tests.loops import eventually, in_loop


class StrangeEngine:
    """An engine whose answers are bytes that the test chooses, one after another in turn.

    Attributes:
        answer: gives the next answer to a path; None: say nothing, ever.
    """

    def __init__(self, answer: Callable[[bytes], bytes | None]) -> None:
        self.answer = answer
        self.url = ""
        self.asked = 0
        self.closed = 0

    async def speak(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(END)
            self.asked += 1
            answer = self.answer(head.split()[1])
            if answer is not None:
                writer.write(answer)
                await writer.drain()
                writer.write_eof()
            while await reader.read(1 << 16):
                pass
        self.closed += 1
        writer.transport.abort()


@asynccontextmanager
async def strange(answer: Callable[[bytes], bytes | None]) -> AsyncIterator[StrangeEngine]:
    engine = StrangeEngine(answer)
    server = await asyncio.start_server(engine.speak, "127.0.0.1", 0)
    engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield engine
    finally:
        server.close()


def http(body: bytes, status: str = "200 OK", *headers: bytes) -> bytes:
    lines = [f"HTTP/1.1 {status}".encode(), b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + END + body


OK = b'{"choices": [{"text": "x"}]}'
ANSWERS: dict[str, bytes | None] = {
    "no http": b"\xff\xfe\x00" * 100,
    "endless headers": b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200_000,
    "one endless header": b"HTTP/1.1 200 OK\r\na: " + b"b" * (1 << 20),
    "an endless body": http(bytes(20 << 20)),
    "elsewhere": http(b"", "302 Found", b"Location: http://127.0.0.1:1/"),
    "unasked gzip": http(gzip.compress(OK), "200 OK", b"Content-Encoding: gzip"),
    "a status beyond all": http(b"", "999 Nothing"),
    "less than it said": b"HTTP/1.1 200 OK\r\nContent-Length: 99" + END + b"x",
    "no chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked" + END + b"zz\r\n",
    "nothing": b"",
    "silence": None,
    "a long refusal": http(bytes(SMALL_ANSWER_BYTES_MAX + 1), "400 Bad"),
    "strange cookies": http(b"", "500 No", b"Set-Cookie: \xff=\xfe; ; ;=; a=b"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_an_engine_that_answers_nonsense_costs_a_try_and_the_next_one_serves(
    kind: str, stream: bool
) -> None:
    good = FakeEngine("z", "mixed")

    def answer(path: bytes) -> bytes | None:
        return ANSWERS[kind] if path == b"/v1/completions" else http(b"{}")

    first_byte_s = 3.0 if kind == "silence" else 10.0
    async with strange(answer) as engine, serving(
        good, deadline={"first_byte_s": first_byte_s, "request_s": 30.0, "idle_s": 10.0},
        health={"probe_s": 60.0, "dead_after": 100},
    ) as client:  # fmt: skip
        body = {"id": "a", "role": "mixed", "url": engine.url, "model": "m"}
        assert (await client.operate("/v1/engines", body))[0] == 201
        if kind == "silence" and not stream:
            client.conductor.proxy._deadline = client.conductor.proxy._deadline.__class__(
                request_s=3.0
            )
        found = [(await client.complete(stream=stream))[0] for _ in range(2)]
        if kind == "silence" and not stream:
            assert sorted(found) == [200, 504]
        else:
            assert found == [200, 200]
        assert engine.asked >= 1
        assert client.conductor.faults.counts["internal"] == 0
        failed = client.conductor.registry.get("a")
        assert failed is not None
        await eventually(lambda: engine.closed == engine.asked, "no connection is kept")


@pytest.mark.parametrize(
    ("events", "done"),
    [
        (b"data: [DONE]\n\n", True),
        (b"data:[DONE]\r\n\r\n", True),
        (b"data: {}\n\ndata:[DONE]\n\n", True),
        (b"data: [DONE]\n\ndata: {}\n\n", False),
        (b'data: {"text": "[DONE]"}\n\n', False),
    ],
)
def test_a_stream_is_whole_with_or_without_a_space_before_its_end(
    events: bytes, done: bool
) -> None:
    assert upstreams._is_done(events) is done


@pytest.mark.parametrize("end", [b"zz\r\n", b"5\r\nabcdefgh", b"f" * 30 + b"\r\n"])
@in_loop
async def test_an_answer_that_turns_to_nonsense_ends_at_once(end: bytes) -> None:
    """Not when a deadline passes; also on a connection that has had a good answer."""
    begun = asyncio.Event()
    event = b"9\r\ndata: x\n\n\r\n"

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for last in (b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n", end):
            await reader.readuntil(END + b"{}")
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked" + END + event)
            await begun.wait()
            begun.clear()
            writer.write(last)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    upstream = Upstream(DeadlineConfig())

    async def read() -> None:
        async with asyncio.timeout(10.0), upstream.stream("e", url, b"{}", {}) as pieces:
            async for piece in pieces:
                if piece == b"data: x\n\n":
                    begun.set()

    try:
        await read()
        with pytest.raises(EngineError, match="in the middle"):
            await read()
    finally:
        await upstream.close()
        server.close()


@in_loop
async def test_an_engine_sends_us_nowhere_else() -> None:
    asked: list[bytes] = []

    def answer(path: bytes) -> bytes | None:
        asked.append(path)
        return http(b"", "307 There", b"Location: " + engine.url.encode() + b"/inner")

    async with strange(answer) as engine, serving(queue={"tries": 1}) as client:
        body = {"id": "a", "role": "mixed", "url": engine.url, "model": "m"}
        assert (await client.operate("/v1/engines", body))[0] == 201
        assert (await client.complete())[0] == 503
        assert (await client.complete(stream=True))[0] == 503
        await eventually(lambda: b"/health" in asked)
        expected = {b"/v1/engine", b"/v1/completions", b"/health"}
        assert set(asked) - {b"/metrics"} == expected


@pytest.mark.parametrize(
    "tokens", [b"[-1]", b"[4294967296]", b'["x"]', b"[[]]", b"{}", b"[1" + b",1" * (3 << 20) + b"]"]
)
@in_loop
async def test_tokens_that_are_none_are_no_tokens(tokens: bytes) -> None:
    good = FakeEngine("z", "mixed")

    def answer(path: bytes) -> bytes | None:
        return http(b'{"tokens": ' + tokens + b"}") if path == b"/tokenize" else http(b"{}")

    async with strange(answer) as engine, serving(
        good, policy={"name": "longest-prefix"}, health={"probe_s": 60.0, "dead_after": 100}
    ) as client:  # fmt: skip
        good.tokenize_status = 500
        body = {"id": "a", "role": "decode", "url": engine.url, "model": "m"}
        assert (await client.operate("/v1/engines", body))[0] == 201
        status, _, headers = await client.complete("a prompt")
        assert status == 200
        assert (await client.decision(headers["X-Request-Id"]))["prompt_tokens"] is None
        assert client.conductor.faults.counts["internal"] == 0


@in_loop
async def test_prompts_without_tokens_are_not_remembered_for_ever() -> None:
    async with serving() as client:
        prompts = client.conductor.proxy._parts.prompts
        for number in range(200_000):
            prompts._remember(number.to_bytes(32, "big"), [])
        assert len(prompts._known) <= 2_000_000 // 16


@pytest.mark.parametrize(
    "described",
    [
        {"page_tokens": 10**18}, {"page_tokens": 0}, {"space": "no digest"}, {"max_running": -1},
        {"events": "udp://x:1"}, {"events": "ipc://@abstract"}, {"events_replay": "x" * 600},
        {"model": "m" * 600}, {"node": "n" * 65},
    ],
)  # fmt: skip
@in_loop
async def test_what_an_engine_says_of_itself_is_bounded(described: dict[str, Any]) -> None:
    engine = await FakeEngine("e", "mixed", **described).start()
    async with serving() as client:
        body = {"id": "e", "role": "mixed", "url": engine.url}
        assert (await client.operate("/v1/engines", body))[0] in (400, 502)
        assert (await client.get("/v1/engines"))[1] == {"engines": []}
    await engine.stop()


@in_loop
async def test_what_an_engine_says_cannot_look_like_lines_of_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def answer(path: bytes) -> bytes | None:
        return http(b"x\n2026-01-01 CRITICAL conductor: all is lost\x1b[2J", "500 No")

    async with strange(answer) as engine, serving(queue={"tries": 1}) as client:
        with caplog.at_level("DEBUG"):
            body = {"id": "a", "role": "mixed", "url": engine.url, "model": "m"}
            assert (await client.operate("/v1/engines", body))[0] == 201
            status, told, _ = await client.complete()
            assert status == 503
            await eventually(lambda: engine.asked >= 3)
            engine_id = {**body, "id": "b", "model": "m\nCRITICAL"}
            assert (await client.operate("/v1/engines", engine_id))[0] == 400
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("cond")]
    assert ours
    assert all(line.isprintable() for line in (*ours, told["error"]["message"]))


@in_loop
async def test_the_series_of_an_engine_end_when_it_is_removed() -> None:
    engine = FakeEngine("e", "mixed")
    async with serving(engine, queue={"tries": 1}) as client:
        engine.broken = "reset"
        assert (await client.complete())[0] == 503
        assert 'engine="e"' in (await client.get("/metrics"))[1]
        assert await client.delete("/v1/engines/e") == 204
        assert 'engine="e"' not in (await client.get("/metrics"))[1]


# Chance


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(3.0, id="quick"),
        pytest.param(0.0, id="soak", marks=pytest.mark.soak("events", minutes=2)),
    ],
)
@in_loop
async def test_no_request_and_no_answer_is_an_error_of_ours(seconds: float, soak_s: float) -> None:
    seconds = seconds or soak_s
    seed = 4 if seconds < 10 else random.SystemRandom().randrange(2**32)
    chance = random.Random(seed)
    pieces = [
        b"GET ", b"POST ", b"DELETE ", b"/health", b"/v1/completions", b"/v1/engines",
        b"/v1/chat/completions", b'{"messages": [{"content": [{"type": ',
        b"/tokenize", b"/v1/decisions?limit=", b"/v1/nodes/", b" HTTP/1.1\r\n", b"Host: h\r\n",
        b"\r\n", b"\r\n\r\n", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n",
        b"Content-Encoding: deflate\r\n", b"Expect: 100-continue\r\n", b"Connection: close\r\n",
        b"Upgrade: websocket\r\n", b"5\r\nabcde\r\n", b"0\r\n\r\n", b'{"id": "e"', b"[" * 2_000,
        b'{"prompt": "x", "stream": true}', b"\xff", b"\x00", b"%00", b"99999999999",
        b"Authorization: Bearer " + OPERATE.encode() + b"\r\n", b"Set-Cookie: a=\r\n",
        b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 500 X\r\n", b"data: {}\n\n", b"data: [DONE]\n\n",
        b"Content-Type: \xff;;=\r\n", b"Location: //\r\n",
    ]  # fmt: skip

    def mess(most: int) -> bytes:
        return b"".join(chance.choice(pieces) for _ in range(chance.randrange(1, most)))

    def answer(path: bytes) -> bytes | None:
        return b"HTTP/1.1 200 OK\r\n" + mess(12) if chance.random() < 0.9 else mess(6)

    def request(path: bytes) -> bytes:
        asked = [
            b'{"prompt": "x"}', b'{"prompt": "x", "stream": true}', b'{"messages": [{}]}',
            b'{"messages": [{"content": ["x"]}], "stream": true}', b'{"messages": [[], "x", {}]}',
        ]  # fmt: skip
        body = chance.choice(asked)
        head = b"POST %s HTTP/1.1\r\nHost: h\r\nConnection: close\r\n" % path
        return head + b"Content-Length: %d" % len(body) + END + body

    async with strange(answer) as engine, serving(
        within_s=60.0 + seconds,
        deadline={"first_byte_s": 0.05, "idle_s": 0.05, "request_s": 0.2, "tokenize_s": 0.05},
        health={"probe_s": 0.02, "probe_timeout_s": 0.05, "backoff_s_max": 0.05},
    ) as client:  # fmt: skip
        loop = asyncio.get_running_loop()
        body = {"id": "a", "role": "mixed", "url": engine.url, "model": "m"}
        end = loop.time() + seconds
        while loop.time() < end or engine.asked <= 20:
            await client.operate("/v1/engines", body)
            asked = [
                asyncio.wait_for(raw(client, mess(15) + END), 0.3),
                asyncio.wait_for(raw(client, request(b"/v1/completions")), 2.0),
                asyncio.wait_for(raw(client, request(b"/v1/chat/completions")), 2.0),
                asyncio.wait_for(raw(client, request(b"/tokenize")), 2.0),
            ]
            for found in await asyncio.gather(*asked, return_exceptions=True):
                assert isinstance(found, (bytes, TimeoutError)), f"seed {seed}: {found!r}"
                is_500 = isinstance(found, bytes) and found.startswith(b"HTTP/1.1 500")
                assert not is_500, f"seed {seed}: {found!r}"
        assert client.conductor.faults.counts["internal"] == 0, f"seed {seed}"
        assert not client.conductor.failed
        assert engine.asked > 20
        assert threading.active_count() < 40
        await eventually(lambda: len(client.conductor.queue) == 0)


COUNTS = (
    {"prompt_tokens": -1, "completion_tokens": -1},
    {"prompt_tokens": 10**30, "completion_tokens": 10**30},
    {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": -5}},
    {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 10**400}},
)  # fmt: skip
TIMINGS = (
    {"restored_tokens": -(10**30), "restore_s": 1e308, "compute_s": -1e308, "queue_s": -1},
    {"restored_tokens": 10**30, "restored_bytes": 10**30, "restore_s": 5e-324, "compute_s": 0},
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "said", [{"usage": one} for one in COUNTS] + [{"timings": one} for one in TIMINGS]
)
@in_loop
async def test_counts_that_no_request_can_have_are_no_counts(
    said: dict[str, object], stream: bool
) -> None:
    whole = json.dumps({"choices": [{"text": "x"}], **said}).encode()

    def answer(path: bytes) -> bytes | None:
        if path != b"/v1/completions":
            return http(b"{}")
        if not stream:
            return http(whole)
        return http(b"data: " + whole + b"\n\ndata: [DONE]\n\n", "200 OK",
                    b"Content-Type: text/event-stream")  # fmt: skip

    policy = {"name": "earliest-first-token"}
    async with strange(answer) as engine, serving(
        policy=policy, health={"probe_s": 60.0}, admission={"mode": "prediction"}
    ) as client:  # fmt: skip
        body = {"id": "a", "role": "mixed", "url": engine.url, "model": "m"}
        assert (await client.operate("/v1/engines", body))[0] == 201
        for _ in range(3):
            status, _, headers = await client.complete([1, 2, 3], stream=stream)
            assert status == 200
            decision = await client.decision(headers["X-Request-Id"])
        told = [one for one in decision["attempts"][-1]["served"].values() if one is not None]
        assert all(0 <= one <= 1 << 50 for one in told)
        assert (await client.get("/metrics"))[0] == 200
        assert (await client.get("/v1/decisions"))[0] == 200
        assert client.conductor.proxy.idle.is_set()
        assert not client.conductor.faults.counts["internal"]
