"""What the Conductor's front adds to the first token, and what relaying streams costs.

The client is a bare protocol, so that it takes little of the machine that it measures.
"""

import asyncio
import itertools
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple, cast
from urllib.parse import urlsplit

import numpy as np
import uvloop

from bench.cluster import LISTENING, Service, register, request, script
from bench.conductor_engine import MODEL
from bench.index_feed import Lines, feed
from bench.index_fleet import Fleet
from bench.index_ours import core_seconds
from bench.measure import percentile

PROMPT_TOKENS: Final = 2_000
RATE: Final = 100.0
STREAMS: Final = 256
STREAM_TOKENS_PER_S: Final = 50.0
LATE_S: Final = 0.020
LONG_TOKENS: Final = 131_072
BLOCKS_PER_S: Final = 100_000
BLOCKS: Final = 128
"""In each message."""
_WRITERS: Final = 8
_VOCABULARY: Final = 150_000
_ANSWER_S: Final = 30.0
_START_S: Final = 40.0
"""Maximum time until the next index can be read."""
_LOOK_S: Final = 0.05
INDEX_GONE: Final = (signal.SIGSTOP, signal.SIGKILL)
INDEX_GONE_S: Final = 12.0
"""Longer than a stopped index is waited for: it is killed and started again meanwhile."""
_STAMP: Final = re.compile(rb'"t":(\d+)')
_END: Final = b"\r\n0\r\n\r\n"


class FrontError(RuntimeError):
    """A request was not answered as it should be."""


class Servers(NamedTuple):
    """URLs of the processes, and pids of those whose CPU time counts."""

    engine: str
    relay: str
    conductor: str
    relay_pid: int
    conductor_pid: int


@contextmanager
def servers() -> Iterator[Servers]:
    """An engine, a relay and a Conductor, as processes."""
    with ExitStack() as undo:
        directory = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="kv-")))

        def start(name: str, *arguments: str) -> tuple[str, int]:
            service = Service(name, arguments, LISTENING, directory)
            undo.callback(service.stop)
            return service.wait_ready().group(1), service.process.pid

        engine, _ = start("engine", sys.executable, "-m", "bench.conductor_engine")
        relay, relay_pid = start("relay", sys.executable, "-m", "bench.conductor_relay", engine)
        conductor, pid = start("conductor", script("kvstore-conductor"), "--port", "0")
        register(conductor, "engines", {"id": "e", "role": "mixed", "url": engine})
        yield Servers(engine, relay, conductor, relay_pid, pid)


@contextmanager
def ingest(at: Servers) -> Iterator[Lines]:
    """Write to the Conductor's index: it follows eight more engines, all the same server.

    The same 200,000 blocks are written again and again. Ask for ``stop`` to hear how many messages
    a second there were, of :data:`BLOCKS` blocks each.
    """
    fleet = Fleet(_WRITERS, 0, 2 * BLOCKS_PER_S, shared=False)
    with feed(None) as publisher:
        endpoints = publisher.ask("open", fleet=fleet)
        for worker, (events, replay) in zip(fleet.workers(), endpoints, strict=True):
            engine = {
                "id": worker.name.replace("/", "-"), "role": "mixed", "url": at.engine,
                "events": events, "events_replay": replay,
            }  # fmt: skip
            register(at.conductor, "engines", engine)
        publisher.ask("wait_subscribed", workers=_WRITERS)
        publisher.ask("make", fleet=fleet, blocks=BLOCKS)
        publisher.ask("steady", rate=BLOCKS_PER_S / BLOCKS, again=True)
        yield publisher


class _Asked(asyncio.Protocol):
    """One streamed completion over a connection of its own.

    Attributes:
        first_s: time of the first event; 0 = none yet.
        delays_s: of each event, from the engine's write to our read.
        ended: set when the answer is complete, or the connection broke.
    """

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self._transport: asyncio.Transport | None = None
        self.first_s = 0.0
        self.delays_s: list[float] = []
        self.complete = False
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by type
        self.began_s = time.monotonic()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        stamps = _STAMP.findall(data)
        if stamps and not self.first_s:
            self.first_s = now / 1e9
        self.delays_s += [(now - int(stamp)) / 1e9 for stamp in stamps]
        self._tail = (self._tail + data)[-len(_END) :]
        if self._tail == _END:
            self.complete = True
            assert self._transport is not None
            self._transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    async def result(self) -> "_Asked":
        """Wait for the end.

        Raises:
            FrontError: the answer is incomplete.
        """
        async with asyncio.timeout(_ANSWER_S):
            await self.ended
        if not self.complete:
            raise FrontError(f"an answer broke off; its end: {self._tail!r}")
        return self


def _request(prompt: Sequence[int], max_tokens: int, interval_s: float) -> bytes:
    body = json.dumps(
        {
            "model": MODEL, "prompt": list(prompt), "max_tokens": max_tokens, "stream": True,
            "interval_s": interval_s, "stream_options": {"include_usage": True},
        }
    ).encode()  # fmt: skip
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def _ask(url: str, request: bytes) -> _Asked:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    loop = asyncio.get_running_loop()
    _, asked = await loop.create_connection(lambda: _Asked(request), parts.hostname, parts.port)
    return asked


class Added(NamedTuple):
    """Milliseconds until the first event: directly, through the relay and through the Conductor.

    Attributes:
        cpu_ms: CPU time of the Conductor for a request, of each round.
    """

    direct: list[float]
    relayed: list[float]
    through: list[float]
    cpu_ms: list[float]

    def at(self, percent: float) -> tuple[float, float]:
        """What the Conductor adds to asking the engine directly, and what the relay adds."""
        direct = percentile(self.direct, percent)
        return percentile(self.through, percent) - direct, percentile(
            self.relayed, percent
        ) - direct


def added_ttft(
    at: Servers, seconds: float, rounds: int, signals: Sequence[signal.Signals] = ()
) -> Added:
    """Ask the engine directly, through the relay and the Conductor in turns, at :data:`RATE`.

    Args:
        at: the processes.
        seconds: of all rounds together, for each of the three.
        rounds: of all three.
        signals: one that the Conductor's index gets when a round of the Conductor begins, by round.
    """
    random = np.random.default_rng(1)
    count = max(1, int(seconds * RATE / rounds))
    prompts = random.integers(1, _VOCABULARY, (count, PROMPT_TOKENS))
    requests = [_request(prompt.tolist(), 1, 0.0) for prompt in prompts]

    async def measure() -> Added:
        added = Added([], [], [], [])
        await _paced(at.conductor, requests[:20])
        await _paced(at.relay, requests[:20])
        for number in range(rounds):
            added.direct.extend(await _paced(at.engine, requests))
            added.relayed.extend(await _paced(at.relay, requests))
            if signals:
                os.kill(await asyncio.to_thread(_index_process, at), signals[number])
            before = core_seconds(at.conductor_pid)
            added.through.extend(await _paced(at.conductor, requests))
            added.cpu_ms.append(1e3 * (core_seconds(at.conductor_pid) - before) / count)
        return added

    return uvloop.run(measure())


def _index_process(at: Servers) -> int:
    """Process id of the Conductor's index, as soon as it can be read.

    Raises:
        FrontError: it is not started in time.
    """
    children = Path(f"/proc/{at.conductor_pid}/task/{at.conductor_pid}/children")
    for _ in range(int(_START_S / _LOOK_S)):
        is_up = request("GET", f"{at.conductor}/v1/index")["up"]
        for child in children.read_text().split() if is_up else ():
            if b"kvstore.index.child" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        time.sleep(_LOOK_S)
    raise FrontError("the Conductor has no index")


async def _paced(url: str, requests: Sequence[bytes]) -> list[float]:
    """Milliseconds until the first event of each, asked at :data:`RATE`."""
    loop = asyncio.get_running_loop()
    began, asked = loop.time(), []
    for number, one in enumerate(requests):
        await asyncio.sleep(max(0.0, began + number / RATE - loop.time()))
        asked.append(await _ask(url, one))
    done = [await one.result() for one in asked]
    return [1e3 * (one.first_s - one.began_s) for one in done]


class Relayed(NamedTuple):
    """Streams through one front.

    Attributes:
        on_time: share of tokens that were here within :data:`LATE_S` of the engine's write.
        cpu_us: CPU time of the front for a token.
    """

    on_time: float
    cpu_us: float


class Streams(NamedTuple):
    """Rounds of the Conductor and of the bare relay, in turns."""

    conductor: list[Relayed]
    relay: list[Relayed]

    def medians(self) -> tuple[float, float, float, float]:
        """On time, of the relay too; microseconds a token, of the relay too."""
        ours, bare = self.conductor, self.relay
        return (
            median(one.on_time for one in ours), median(one.on_time for one in bare),
            median(one.cpu_us for one in ours), median(one.cpu_us for one in bare),
        )  # fmt: skip


def streams(
    at: Servers, count: int, seconds: float, rounds: int, *, prompts_per_s: float = 0.0
) -> Streams:
    """Relay ``count`` streams of 50 tokens/s through the Conductor and the bare relay, in turns.

    Args:
        at: the processes.
        count: streams at a time.
        seconds: of each round.
        rounds: of both.
        prompts_per_s: prompts of :data:`LONG_TOKENS` that the Conductor gets besides.
    """

    async def measure() -> Streams:
        found = Streams([], [])
        for _ in range(rounds):
            relay = _relayed(at.relay, at.relay_pid, count, seconds)
            found.relay.append(await relay)
            besides = asyncio.create_task(_long_prompts(at.conductor, prompts_per_s, seconds))
            ours = await _relayed(at.conductor, at.conductor_pid, count, seconds)
            found.conductor.append(ours)
            await besides
        return found

    return uvloop.run(measure())


async def _relayed(url: str, pid: int, count: int, seconds: float) -> Relayed:
    prompt = range(1, 101)
    tokens = max(2, int(seconds * STREAM_TOKENS_PER_S))
    request = _request(prompt, tokens, 1 / STREAM_TOKENS_PER_S)
    before = core_seconds(pid)
    asked = []
    for _ in range(count):
        asked.append(await _ask(url, request))
        await asyncio.sleep(1 / STREAM_TOKENS_PER_S / count * 4)
    done = [await one.result() for one in asked]
    cpu_s = core_seconds(pid) - before
    delays = list(itertools.chain.from_iterable(one.delays_s for one in done))
    if len(delays) != count * tokens:
        raise FrontError(f"{len(delays)} tokens came of {count * tokens}")
    return Relayed(sum(one <= LATE_S for one in delays) / len(delays), 1e6 * cpu_s / len(delays))


async def _long_prompts(url: str, per_s: float, seconds: float) -> None:
    if not per_s:
        return
    random = np.random.default_rng(2)
    for _ in range(int(per_s * seconds)):
        prompt = random.integers(1, _VOCABULARY, LONG_TOKENS).tolist()
        asked = await _ask(url, await asyncio.to_thread(_request, prompt, 1, 0.0))
        await asyncio.sleep(1 / per_s)
        await asked.result()
