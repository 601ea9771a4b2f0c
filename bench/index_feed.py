"""Publishes the KV events of a fleet over real ZeroMQ sockets, from a process of its own.

``python -m bench.index_feed`` reads one JSON command a line and writes one JSON answer a line. All
messages are made before the first is sent. Each worker has a PUB socket (XPUB, so that it is known
when everybody has subscribed) and a ROUTER socket for replays; neither has a limit, so nothing is
ever lost.
"""

import itertools
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec
import zmq

from bench.index_fleet import (
    PAGE_TOKENS,
    Fleet,
    Prompt,
    Worker,
    hashes,
    tokens,
)
from kvstore.protocol.page import page_keys

SPACE: Final = "5a" * 32
SHARD: Final = "5d" * 8
BOOT: Final = "b0" * 16
TOPIC: Final = b"kv-events"
END_OF_REPLAY: Final = (2**64 - 1).to_bytes(8, "big")
MODEL: Final = "model:bench"
"""The domain of engines' own blocks, as the Conductor names it."""
_TICK_MS: Final = 2
_SUBSCRIBED_S: Final = 60.0
_ANSWER_S: Final = 600.0
_ROOT: Final = Path(__file__).resolve().parent.parent


class FeedError(RuntimeError):
    """The feed did not do what it was asked for."""


# What is published


def messages(fleet: Fleet, blocks: int) -> Iterator[tuple[int, bytes]]:
    """All payloads of a fleet with their workers' places; the workers take turns.

    Args:
        fleet: whose.
        blocks: in each message; the last one of a worker may have fewer.
    """
    lines = [_payloads(fleet, worker, blocks) for worker in fleet.workers()]
    for turn in itertools.zip_longest(*lines):
        for index, payload in enumerate(turn):
            if payload is not None:
                yield index, payload


def _payloads(fleet: Fleet, worker: Worker, blocks: int) -> Iterator[bytes]:
    events: list[dict[str, object]] = []
    room = blocks
    runs = _token_runs if worker.kind == "tokens" else _key_runs
    for prompt in fleet.prompts(worker):
        for event, count in runs(prompt, room, blocks):
            events.append(event)
            room -= count
            if not room:
                yield _payload(worker, events)
                events, room = [], blocks
    if events:
        yield _payload(worker, events)


def _payload(worker: Worker, events: list[dict[str, object]]) -> bytes:
    rank = 0 if worker.kind == "tokens" else None
    return msgspec.msgpack.encode([time.clock_gettime(time.CLOCK_REALTIME), events, rank])


def _cuts(pages: int, room: int, blocks: int) -> Iterator[tuple[int, int]]:
    """Where to cut a prompt, if the first message has ``room`` left."""
    start = 0
    while start < pages:
        end = min(start + room, pages)
        yield start, end
        start, room = end, blocks


def _token_runs(prompt: Prompt, room: int, blocks: int) -> Iterator[tuple[dict[str, object], int]]:
    """A prompt as vLLM announces it."""
    own = hashes(prompt).tolist()
    flat = tokens(prompt).ravel().tolist()
    for start, end in _cuts(prompt.pages, room, blocks):
        yield (
            {
                "type": "BlockStored",
                "block_hashes": own[start:end],
                "parent_block_hash": own[start - 1] if start else None,
                "token_ids": flat[start * PAGE_TOKENS : end * PAGE_TOKENS],
                "block_size": PAGE_TOKENS,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [None] * (end - start),
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            },
            end - start,
        )


def _key_runs(prompt: Prompt, room: int, blocks: int) -> Iterator[tuple[dict[str, object], int]]:
    """A prompt as our nodes announce it."""
    packed = keys(prompt)
    own = [packed[at : at + 32] for at in range(0, len(packed), 32)]
    for start, end in _cuts(prompt.pages, room, blocks):
        yield (
            {
                "type": "BlockStored",
                "block_hashes": own[start:end],
                "parent_block_hash": own[start - 1] if start else None,
                "token_ids": [],
                "block_size": PAGE_TOKENS,
                "medium": "CPU",
                "lora_id": None,
                "lora_name": None,
                "space": SPACE,
                "shard": 0,
                "shard_digest": SHARD,
                "boot": BOOT,
            },
            end - start,
        )


def keys(prompt: Prompt) -> bytes:
    """Prefix keys of a prompt, packed: of documents those of its tokens, else any others."""
    if prompt.is_document:
        return page_keys(tokens(prompt).ravel(), PAGE_TOKENS).packed
    four = hashes(Prompt(prompt.number, 4 * prompt.pages))
    return four.tobytes()


# The process that publishes


class Sockets:
    """The sockets of all workers of a fleet, and what was sent over them.

    Args:
        context: makes them.
        fleet: whose.
    """

    def __init__(self, context: zmq.Context[Any], fleet: Fleet) -> None:
        self.published = [self._bound(context, zmq.XPUB) for _ in fleet.workers()]
        self.routers = [self._bound(context, zmq.ROUTER) for _ in fleet.workers()]
        self._kept: list[list[bytes]] = [[] for _ in self.published]
        self._sent = [0] * len(self.published)

    @staticmethod
    def _bound(context: zmq.Context[Any], kind: int) -> zmq.Socket[Any]:
        bound: zmq.Socket[Any] = context.socket(kind)
        bound.setsockopt(zmq.SNDHWM, 0)
        bound.setsockopt(zmq.LINGER, 0)
        if kind == zmq.XPUB:
            bound.setsockopt(zmq.XPUB_VERBOSE, 1)
        bound.bind("tcp://127.0.0.1:*")
        return bound

    def endpoints(self) -> list[tuple[str, str]]:
        """Of each worker: where its events are, and its replays."""
        pairs = zip(self.published, self.routers, strict=True)
        return [(_endpoint(pub), _endpoint(router)) for pub, router in pairs]

    def wait_subscribed(self, workers: int) -> None:
        """Wait until somebody follows each of the first workers.

        Raises:
            FeedError: that takes too long.
        """
        deadline = time.monotonic() + _SUBSCRIBED_S
        for published in self.published[:workers]:
            while published.poll(max(int(1e3 * (deadline - time.monotonic())), 0)):
                if published.recv() == b"\x01":
                    break
            else:
                raise FeedError("nobody subscribes")

    def send(self, index: int, payload: bytes, *, keep: bool) -> None:
        """Publish one payload of a worker; ``keep`` it for replays."""
        number = self._sent[index].to_bytes(8, "big")
        self._sent[index] += 1
        self.published[index].send_multipart((TOPIC, number, payload), copy=True)
        if keep:
            self._kept[index].append(payload)

    def replay(self, index: int) -> None:
        """Answer what waits at the ROUTER socket of a worker."""
        router = self.routers[index]
        client, _, first = router.recv_multipart()
        number = int.from_bytes(first, "big")
        for payload in self._kept[index][number:]:
            router.send_multipart((client, b"", TOPIC, number.to_bytes(8, "big"), payload))
            number += 1
        router.send_multipart((client, b"", TOPIC, END_OF_REPLAY, b""))

    def close(self) -> None:
        """Close all sockets."""
        for bound in (*self.published, *self.routers):
            bound.close()


def _endpoint(bound: zmq.Socket[Any]) -> str:
    return bound.getsockopt_string(zmq.LAST_ENDPOINT)


class _Process:
    """What the process does between commands: answer replays, and write steadily."""

    def __init__(self) -> None:
        self._context: zmq.Context[Any] = zmq.Context(2)
        self._sockets: Sockets | None = None
        self._made: list[tuple[int, bytes]] = []
        self._pieces: Iterator[tuple[int, bytes]] = iter(())
        self._steady: Iterator[tuple[int, bytes]] = iter(())
        self._steady_from = 0.0
        self._steady_sent = 0
        self._steady_rate = 0.0

    def run(self) -> None:
        """Obey until stdin ends."""
        while True:
            line = self._next_line()
            if not line:
                return
            command = json.loads(line)
            answer = getattr(self, "do_" + command.pop("do"))(**command)
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()

    def _next_line(self) -> str:
        poller = zmq.Poller()
        poller.register(sys.stdin.fileno(), zmq.POLLIN)
        routers = {} if self._sockets is None else {
            router: index for index, router in enumerate(self._sockets.routers)
        }  # fmt: skip
        for router in routers:
            poller.register(router, zmq.POLLIN)
        while True:
            ready = poller.poll(_TICK_MS if self._steady_rate else None)
            for which, _ in ready:
                if which == sys.stdin.fileno():
                    return sys.stdin.readline()
                assert self._sockets is not None, "there are routers"
                self._sockets.replay(routers[which])
            self._tick()

    def _tick(self) -> None:
        """Send as much as should have been sent by now."""
        due = int(self._steady_rate * (time.monotonic() - self._steady_from))
        while self._steady_sent < due:
            one = next(self._steady, None)
            if one is None:
                self._steady_rate = 0.0
                return
            assert self._sockets is not None, "somebody listens"
            self._sockets.send(*one, keep=True)
            self._steady_sent += 1

    def do_make(self, fleet: list[Any], blocks: int) -> int:
        """Make the messages of a fleet; how many they are."""
        self._made = list(messages(Fleet(*fleet), blocks))
        return len(self._made)

    def do_decode(self) -> tuple[float, float]:
        """Seconds that decoding what was made takes, and nothing else; and those of CPU time."""
        payloads = [payload for _, payload in self._made]
        decode = msgspec.msgpack.Decoder().decode
        began, cpu_began = time.perf_counter(), time.thread_time()
        for payload in payloads:
            decode(payload)
        return time.perf_counter() - began, time.thread_time() - cpu_began

    def do_open(self, fleet: list[Any]) -> list[tuple[str, str]]:
        """Bind new sockets in place of the present ones; their endpoints."""
        self.do_close()
        self._sockets = Sockets(self._context, Fleet(*fleet))
        return self._sockets.endpoints()

    def do_wait_subscribed(self, workers: int) -> bool:
        """Wait for followers of the first workers."""
        assert self._sockets is not None, "opened before"
        self._sockets.wait_subscribed(workers)
        return True

    def do_send(self, *, keep: bool) -> tuple[int, int]:
        """Publish what was made; when that began and ended, in ns of the monotonic clock."""
        assert self._sockets is not None, "opened before"
        began = time.monotonic_ns()
        for index, payload in self._made:
            self._sockets.send(index, payload, keep=keep)
        return began, time.monotonic_ns()

    def do_stream(self, fleet: list[Any], blocks: int) -> int:
        """Publish a fleet without making all its messages first; how many they were."""
        assert self._sockets is not None, "opened before"
        count = 0
        for index, payload in messages(Fleet(*fleet), blocks):
            self._sockets.send(index, payload, keep=False)
            count += 1
        return count

    def do_begin(self, fleet: list[Any], blocks: int) -> bool:
        """Prepare to publish a fleet piece by piece."""
        self._pieces = messages(Fleet(*fleet), blocks)
        return True

    def do_piece(self, most: int) -> int:
        """Publish so many messages of that fleet, or what is left of it; how many they were."""
        assert self._sockets is not None, "opened before"
        count = 0
        for index, payload in itertools.islice(self._pieces, most):
            self._sockets.send(index, payload, keep=False)
            count += 1
        return count

    def do_steady(self, rate: float, *, again: bool = False) -> bool:
        """From now on publish what was made, at ``rate`` messages a second; or again and again."""
        self._steady = itertools.cycle(self._made) if again else iter(self._made)
        self._steady_rate = rate
        self._steady_sent, self._steady_from = 0, time.monotonic()
        return True

    def do_stop(self) -> float:
        """Stop what :meth:`do_steady` began; the messages a second that it has sent."""
        self._steady_rate = 0.0
        return self._steady_sent / (time.monotonic() - self._steady_from)

    def do_close(self) -> bool:
        """Close the sockets."""
        if self._sockets is not None:
            self._sockets.close()
        self._sockets = None
        return True


# The process that measures


class Lines:
    """A child process that reads and writes JSON lines; a context manager, which ends it.

    Args:
        command: starts it.
        environment: variables besides this process's own.
        cores: cores on which it may run; None = wherever this process may.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: dict[str, str] | None = None,
        cores: Iterable[int] | None = None,
    ) -> None:
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
        self.pin(cores)

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._child.pid

    def pin(self, cores: Iterable[int] | None) -> None:
        """Let all threads of the child run on these cores only; None changes nothing."""
        if cores is not None:
            for thread in Path(f"/proc/{self.pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), cores)

    def ask(self, do: str, **arguments: object) -> Any:
        """Give one command and wait for its answer.

        Raises:
            FeedError: it ended, or does not answer in time.
        """
        assert self._child.stdin is not None, "it was started with pipes"
        assert self._child.stdout is not None, "it was started with pipes"
        self._child.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self._child.stdin.flush()
        readable, _, _ = select.select([self._child.stdout], [], [], _ANSWER_S)
        line = self._child.stdout.readline() if readable else b""
        if not line:
            raise FeedError(f"{do!r}: the process ended, or took more than {_ANSWER_S:g} s")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()


def feed(cores: Iterable[int] | None) -> Lines:
    """Start the process that publishes."""
    return Lines([sys.executable, "-m", "bench.index_feed"], cores=cores)


if __name__ == "__main__":
    _Process().run()
