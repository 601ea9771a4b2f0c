"""Prefill in this process, decode in another, as engines are: pushes between their pools."""

import multiprocessing
import random
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Final

from bench.handoff_pools import (
    POOL_BLOCKS,
    PROMPT_BLOCKS,
    PROMPT_BYTES,
    TOKENS,
    TURNS_MIN,
    WAIT_S,
    bare_sockets,
    new_pool,
    send_all,
    wait_ended,
)
from bench.measure import Result, interleave, throughput
from kvstore.handoff.decode import DecodeManager
from kvstore.handoff.prefill import PrefillManager
from kvstore.handoff.registry import HandoffRegistry
from kvstore.handoff.rooms import RoomNumbers
from kvstore.handoff.states import State
from kvstore.process.tls import CertificateFiles

SPACE: Final = b"demo"


class Push:
    """Calling it pushes a prompt's KV; seconds from the first layer until decode has everything."""

    def __init__(self, prefill: PrefillManager, pipe: Connection, orders: "Orders") -> None:
        self._prefill = prefill
        self._pipe = pipe
        self._orders = orders
        self._rooms = RoomNumbers(secrets.randbits(31))

    def __call__(self) -> float:
        """Push once."""
        room = self._rooms.draw()
        sender, blocks = self._prefill.sender(room, TOKENS), self._orders.draw()
        self._pipe.send(room)
        self._answer()
        start = time.perf_counter()
        send_all(sender, blocks)
        self._answer()
        spent = time.perf_counter() - start
        deadline = time.monotonic() + WAIT_S
        while sender.holds_blocks:
            assert time.monotonic() < deadline, "prefill does not hear that it is done"
            time.sleep(0.0002)
        assert sender.state is State.SUCCESS, sender.failure
        sender.close()
        return spent

    def _answer(self) -> None:
        if not self._pipe.poll(WAIT_S):
            raise TimeoutError("decode's process does not answer")
        self._pipe.recv()


class Orders:
    """The blocks of prompt after prompt.

    Args:
        permuted: any blocks of the pool in any order; else always its first blocks.
        seed: of the order.
    """

    def __init__(self, *, permuted: bool, seed: int) -> None:
        self._permuted = permuted
        self._random = random.Random(seed)

    def draw(self) -> list[int]:
        """The blocks of the next prompt."""
        if self._permuted:
            return self._random.sample(range(POOL_BLOCKS), PROMPT_BLOCKS)
        return list(range(PROMPT_BLOCKS))


@contextmanager
def pushing(*, permuted: bool, certificates: CertificateFiles | None = None) -> Iterator[Push]:
    """What pushes a prompt's KV; both processes have their pool until the block ends.

    Args:
        permuted: as of :class:`Orders`.
        certificates: of both processes and the registry; None = no TLS.
    """
    secret = secrets.token_bytes(32)
    registry = HandoffRegistry("127.0.0.1", 0, secret, certificates=certificates)
    pool, _memory = new_pool()
    prefill = PrefillManager(pool, SPACE, secret, registry=registry.url, certificates=certificates)
    try:
        arguments = (registry.url, secret, permuted, certificates)
        with decode_process(_decode, *arguments) as pipe:
            yield Push(prefill, pipe, Orders(permuted=permuted, seed=1))
    finally:
        prefill.close()
        registry.close()


@contextmanager
def decode_process(program: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """A process that takes pushes until the block ends; what it is told and asked through.

    Args:
        program: a function of a module; it ends when it receives None.
        arguments: arguments of ``program`` after its end of the pipe.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    decode = context.Process(target=program, args=(there, *arguments))
    decode.start()
    try:
        yield here
    finally:
        here.send(None)
        decode.join(WAIT_S)
        if decode.is_alive():
            decode.kill()
            decode.join()


def pushes(name: str, seconds: float) -> Iterator[Result]:
    """``push/block16/...``: a prompt's KV from pool to pool."""
    with pushing(permuted=name.endswith("permuted")) as push, bare_sockets() as bare:
        measured = interleave(push, bare, pairs=TURNS_MIN, min_seconds=seconds)
    yield throughput(name, PROMPT_BYTES, measured, "two bare TCP sockets, same bytes")


def _decode(
    pipe: Connection, registry: str, secret: bytes, permuted: bool,  # noqa: FBT001
    certificates: CertificateFiles | None,
) -> None:  # fmt: skip
    """Decode's process: take pushes until there is no room."""
    pool, _memory = new_pool()
    manager = DecodeManager(pool, SPACE, secret, name="bench", certificates=certificates)
    take_pushes(manager, pipe, registry, permuted=permuted)
    manager.close()


def take_pushes(manager: DecodeManager, pipe: Connection, registry: str, *, permuted: bool) -> None:
    """Take a push for each room that comes, until None comes."""
    orders = Orders(permuted=permuted, seed=2)
    while (room := pipe.recv()) is not None:
        receiver = manager.receiver(room, registry, TOKENS)
        receiver.announce(0, orders.draw())
        pipe.send(room)
        wait_ended([receiver])
        assert receiver.state is State.SUCCESS, receiver.failure
        pipe.send(room)
        receiver.close()
