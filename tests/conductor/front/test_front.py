"""Goal: what one HTTP client or one engine sends costs that connection, and never the Conductor."""

import asyncio
import contextlib
import gzip
import sys
import time
from typing import Any

import pytest

from conductor.front import connections
from tests.conductor.fakes import OPERATE, FakeEngine, bearer, serving
from tests.loops import eventually, in_loop

END = b"\r\n\r\n"


async def raw(client: Any, *pieces: bytes) -> bytes:
    """Send bytes to the Conductor; gives all that it answers until it closes."""
    host, _, port = client.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            return await reader.read()
        return b""
    finally:
        writer.transport.abort()


async def connect(client: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = client.url.removeprefix("http://").rpartition(":")
    return await asyncio.open_connection(host, int(port))


# Connections


@in_loop
async def test_a_connection_that_says_nothing_is_closed(monkeypatch) -> None:
    monkeypatch.setattr(connections, "FIRST_REQUEST_S", 0.05)
    async with serving() as client:
        reader, writer = await connect(client)
        slow, slow_writer = await connect(client)
        slow_writer.write(b"GET /health HTTP/1.1\r\nX-Slow: ")
        assert await reader.read() == b""
        assert await slow.read() == b""
        assert client.conductor.faults.counts["silent"] == 2
        monkeypatch.setattr(connections, "FIRST_REQUEST_S", 15.0)
        assert (await client.get("/health"))[0] == 200
        writer.close()
        slow_writer.close()


@in_loop
async def test_when_there_are_too_many_the_longest_idle_one_makes_room() -> None:
    async with serving() as client:
        client.conductor._front._most = 3
        idle = [await connect(client) for _ in range(5)]
        await eventually(lambda: client.conductor.faults.counts["full"] >= 2)
        assert (await client.get("/health"))[0] == 200
        assert await idle[0][0].read() == b""
        for _, writer in idle:
            writer.close()


@in_loop
async def test_when_all_are_in_use_nobody_else_is_let_in_and_none_is_cut() -> None:
    engine = FakeEngine("e", "mixed")
    async with serving(engine) as client:
        engine.gate.clear()
        running = [asyncio.create_task(client.complete()) for _ in range(2)]
        await eventually(lambda: engine.running == 2)
        client.conductor._front._most = len(client.conductor._front._server.connections)
        for idle in list(client.conductor._front._idle):
            client.conductor._front._forget(idle)
        reader, writer = await connect(client)
        assert await reader.read() == b""
        writer.close()
        engine.gate.set()
        assert [(await one)[0] for one in running] == [200, 200]


@in_loop
async def test_a_connection_is_idle_again_after_its_request() -> None:
    async with serving() as client:
        assert (await client.get("/health"))[0] == 200
        await eventually(lambda: len(client.conductor._front._idle) == 1)
        assert client.conductor._front._new == {}


# Requests


HOSTILE = {
    "no http": b"\x16\x03\x01\x02\x00" * 40,
    "no such version": b"GET /health HTTP/9.9" + END,
    "a long line": b"GET /" + b"x" * 100_000 + b" HTTP/1.1" + END,
    "many headers": b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 50_000 + b"\r\n",
    "two lengths": b"POST /tokenize HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3" + END,
    "a length that is none": b"POST /tokenize HTTP/1.1\r\nContent-Length: -1" + END,
    "chunks that are none": b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked" + END + b"zz",
    "what is no gzip": b"POST /tokenize HTTP/1.1\r\nContent-Encoding: gzip\r\nContent-Length: 3"
    + END + b"abc",
    "no UTF-8 in a path": b"GET /v1/decisions/%ff%fe HTTP/1.1\r\nHost: h" + END,
    "a number of 5000 digits": b"GET /v1/decisions?limit=" + b"9" * 5_000 + b" HTTP/1.1" + END,
    "a limit in another script": "GET /v1/decisions?limit=٣ HTTP/1.1\r\n\r\n".encode(),
    "no UTF-8 in a token": b"DELETE /v1/nodes/x HTTP/1.1\r\nAuthorization: Bearer \xff\xfe" + END,
}  # fmt: skip


@in_loop
async def test_requests_that_are_none_are_counted_and_do_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as client:
        for _ in range(20):
            await raw(client, b"POST /tokenize HTTP/1.1\r\nHost: h\r\nContent-Length: -1" + END)
        assert client.conductor.faults.counts == {"malformed": 20}
        assert len(caplog.records) == 1


@pytest.mark.parametrize("kind", HOSTILE)
@in_loop
async def test_a_request_that_is_none_is_the_clients_mistake(kind: str) -> None:
    async with serving() as client:
        data = HOSTILE[kind]
        if b"HTTP/1.1\r\n" in data:
            data = data.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\r\nHost: h\r\nConnection: close\r\n", 1)
        answer = await raw(client, data)
        assert not answer or answer.split()[1][:1] == b"4", answer[:200]
        assert (await client.get("/health"))[0] == 200
        assert client.conductor.faults.counts["internal"] == 0


BODIES = {
    "no UTF-8": b'{"prompt": "\xff\xfe"}',
    "nested without end": b'{"prompt": ' + b"[" * 100_000,
    "half a surrogate": b'{"prompt": "\\ud800"}',
    "a huge number": b'{"prompt": [' + b"9" * 5_000 + b"]}",
    "a number beyond all": b'{"prompt": 1e999}',
    "a negative token": b'{"prompt": [-1]}',
    "a long model": b'{"prompt": "x", "model": "' + b"m" * 513 + b'"}',
    "nothing": b"",
    "null": b"null",
}


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/v1/engines", "/v1/nodes"])
@in_loop
async def test_a_body_that_cannot_be_read_is_400_everywhere(kind: str, path: str) -> None:
    async with serving(FakeEngine("e", "mixed")) as client:
        status, answer, _ = await client.operate(path, BODIES[kind])
        assert status == 400, answer
        assert answer["error"]["code"] == "invalid_value"


@in_loop
async def test_a_body_that_grows_when_it_is_unpacked_is_bounded() -> None:
    bomb = gzip.compress(b'{"prompt": "' + b"x" * (64 << 20) + b'"}')
    async with serving() as client:
        headers = {"Content-Encoding": "gzip", **bearer(OPERATE)}
        assert (await client.post("/v1/completions", bomb, **headers))[0] == 413


@in_loop
async def test_the_bodies_of_all_requests_together_are_bounded_however_slowly_they_come() -> None:
    """Each is within the limit of one; thousands of connections may send one."""
    async with serving(FakeEngine("e", "mixed")) as client:
        bodies = client.conductor.bodies
        bodies.total_bytes_max = 10_000
        head = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 9000\r\n\r\n"
        host, port = client.url.removeprefix("http://").split(":")
        slow = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        try:
            slow[0][1].write(head + b"x" * 8_000)
            await eventually(lambda: bodies.total_bytes == 8_000)
            slow[1][1].write(head + b"x" * 8_000)
            answer = await slow[1][0].readuntil(b"}}")
            assert answer.split()[1] == b"503"
            assert b"Retry-After: 1" in answer
            assert b"bodies_full" in answer
            assert bodies.total_bytes == 8_000, "what was refused counts no more"
            assert (await client.complete("short"))[0] == 200
            slow[0][1].close()
            await eventually(lambda: bodies.total_bytes == 0, "who leaves gives it back")
            assert (await client.complete("x" * 9_000))[0] == 200
        finally:
            for _, writer in slow:
                writer.close()
        assert client.conductor.faults.counts["bodies"] == 1


@in_loop
async def test_a_body_counts_until_its_request_has_ended() -> None:
    engine = FakeEngine("e", "mixed")
    async with serving(engine, http={"body_bytes_max": 1_000}) as client:
        bodies = client.conductor.bodies
        engine.gate.clear()
        asked = asyncio.create_task(client.complete("x" * 500))
        await eventually(lambda: engine.running == 1)
        assert bodies.total_bytes > 500
        assert (await client.complete("x" * 2_000))[0] == 413
        assert (await client.operate("/v1/nodes", b"no JSON"))[0] == 400
        assert 500 < bodies.total_bytes < 1_000
        engine.gate.set()
        await asked
        assert bodies.total_bytes == 0


@in_loop
async def test_a_request_arrives_when_its_body_is_there_however_slowly_it_came() -> None:
    """Its wait for an engine, and its time to the first token, begin then."""
    engine = FakeEngine("e", "mixed", max_running=1)
    async with serving(engine, queue={"wait_s": 2.5}) as client:
        body = b'{"prompt": [1, 2]}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nX-Request-Id: slow\r\n"
        head += b"Content-Length: %d\r\n\r\n" % len(body)
        host, port = client.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head + body[:5])
        await eventually(lambda: client.conductor.bodies.total_bytes == 5)
        began = time.monotonic()
        await eventually(lambda: time.monotonic() > began + 2.6)
        engine.gate.clear()
        asked = asyncio.create_task(client.complete("before it"))
        await eventually(lambda: engine.running == 1)
        sent = time.monotonic()
        writer.write(body[5:])
        await eventually(lambda: len(client.conductor.queue) == 1, "it is not refused at once")
        engine.gate.set()
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.split()[1] == b"200"
        assert (await asked)[0] == 200
        decision = await client.decision("slow")
        assert decision["total_s"] <= time.monotonic() - sent
        writer.close()


# Our own mistakes


@in_loop
async def test_an_error_of_ours_ends_that_request_and_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a bug")

    async with serving() as client:
        monkeypatch.setattr(client.conductor.decisions, "newest", broken)
        status, answer = await client.get("/v1/decisions")
        assert (status, answer["error"]["code"]) == (500, "internal")
        assert "a bug" not in str(answer)
        assert client.conductor.faults.counts == {"internal": 1}
        assert 'faults_total{cause="internal"} 1.0' in (await client.get("/metrics"))[1]
        assert (await client.get("/health"))[0] == 200


@pytest.mark.parametrize("where", ["in a request", "in a timer"])
@in_loop
async def test_a_failed_assertion_ends_the_conductor(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise AssertionError("a bug")

    async with serving() as client:
        if where == "in a request":
            monkeypatch.setattr(client.conductor.decisions, "newest", broken)
            with contextlib.suppress(OSError):
                assert (await client.get("/v1/decisions"))[0] == 500
        else:
            asyncio.get_running_loop().call_soon(broken)
        await eventually(lambda: client.conductor.failed)
        await eventually(lambda: client.conductor._stop.is_set())


def test_the_command_says_so_and_ends_with_1(spawn: Any) -> None:
    code = (
        "import asyncio, sys\n"
        "from conductor import service\n"
        "def broken(self): raise AssertionError('a bug')\n"
        "service.Conductor._pump = broken\n"
        "service.RequestQueue.__len__ = lambda self: 1\n"
        "serve = service.Conductor.serve\n"
        "async def also(self, stop, ready):\n"
        "    asyncio.get_running_loop().call_soon(self._pump)\n"
        "    await serve(self, stop, ready)\n"
        "service.Conductor.serve = also\n"
        "sys.exit(service.main(['--port', '0']))\n"
    )
    process = spawn([sys.executable, "-c", code])
    assert process.wait() == 1
    assert "a bug: the Conductor stops" in process.stderr
    assert "AssertionError: a bug" in process.stderr
