"""Managers of both sides with Mooncake's engines, in this process or in others.

``python -m tests.cluster_processes.handoff_mooncake_scene prefill`` and ``... decode REGISTRY`` are
processes of one side; they end by a signal.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.handoff.decode import DecodeManager, Receiver
from kvstore.handoff.mooncake import MooncakeLanding, MooncakeWriter
from kvstore.handoff.prefill import PrefillManager, Sender
from kvstore.handoff.registry import HandoffRegistry
from kvstore.handoff.shared_memory import SharedMemory
from kvstore.handoff.states import Patience, State
from tests.conftest import wait_for
from tests.handoff.pair import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    BLOCKS,
    LAYERS,
    SECRET,
    SPACE,
    Memory,
    push_all,
)

PATIENCE = Patience(bootstrapping_s=10, waiting_s=10, transferring_s=5, total_s=60)
SIZE = 2 * LAYERS * BLOCK_BYTES * BLOCKS
OLD, NEW = list(range(64)), list(range(64, 128))


class Scene:
    """Managers of both sides in this process, each with an engine in a process of its own."""

    def __init__(self) -> None:
        self.registry = HandoffRegistry("127.0.0.1", 0, SECRET)
        shared = SharedMemory(SIZE), SharedMemory(SIZE)
        self.shared = shared
        self.here, self.there = (Memory(shared=one) for one in shared)
        self.writer = MooncakeWriter(shared[0], protocol="tcp")
        self.landing = MooncakeLanding(shared[1], self.there.starts, protocol="tcp")
        url = self.registry.url
        self.prefill = PrefillManager(
            self.here.pool, SPACE, SECRET, registry=url, patience=PATIENCE, writer=self.writer
        )
        self.decode = DecodeManager(
            self.there.pool, SPACE, SECRET, name="d0", patience=PATIENCE, engine=self.landing
        )

    def begin(self, room: int, blocks: list[int]) -> tuple[Sender, Receiver]:
        tokens = len(blocks) * BLOCK_TOKENS
        receiver = self.decode.receiver(room, self.registry.url, tokens)
        receiver.announce(0, blocks)
        return self.prefill.sender(room, tokens), receiver

    def push(self, room: int, here: list[int], there: list[int]) -> Receiver:
        """A whole handoff; it succeeds."""
        sender, receiver = self.begin(room, there)
        push_all(sender, self.here, here)
        until(lambda: receiver.state in (State.SUCCESS, State.FAILED))
        assert receiver.state == State.SUCCESS, receiver.failure
        assert self.there.has(room, range(len(there)), there)
        sender.close()
        receiver.close()
        return receiver

    def written(self) -> int:
        """Blocks that went over Mooncake and not over the link."""
        return self.writer._mooncake.stats()["written_pages"]

    def engine_pid(self) -> int:
        """The process that decode's pool is written through."""
        process = self.landing._engine.process
        assert process is not None
        return int(process._process.pid)

    def writer_pid(self) -> int:
        process = self.writer._mooncake._reader.process
        assert process is not None
        return int(process._process.pid)

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()
        self.registry.close()
        for one in self.shared:
            one.close()


def until(condition: object, limit_s: float = 20.0) -> None:
    assert wait_for(condition, limit_s)  # type: ignore[arg-type]


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    status = Path(f"/proc/{pid}/stat")
    until(lambda: status.read_text().rpartition(")")[2].split()[0] == "T")


@contextmanager
def side(*words: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A process with one side, and the words that it says when it is ready."""
    command = [sys.executable, "-m", "tests.cluster_processes.handoff_mooncake_scene", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().split()
        finally:
            process.kill()


def run_prefill() -> None:
    """A prefill engine that pushes the whole of room 2; it says where, and when it writes."""
    shared, registry = SharedMemory(SIZE), HandoffRegistry("127.0.0.1", 0, SECRET)
    memory, writer = Memory(shared=shared), MooncakeWriter(shared, protocol="tcp")
    manager = PrefillManager(
        memory.pool, SPACE, SECRET, registry=registry.url, patience=PATIENCE, writer=writer
    )
    push_all(manager.sender(2, 64 * BLOCK_TOKENS), memory, OLD)
    process = writer._mooncake._reader.process
    assert process is not None
    say(f"{registry.url} {process._process.pid}")
    until(lambda: bool(writer._moving))
    say("writing")
    signal.pause()


def run_decode(url: str) -> None:
    """A decode engine that waits for room 2; it says which process is its engine."""
    shared = SharedMemory(SIZE)
    memory = Memory(shared=shared)
    landing = MooncakeLanding(shared, memory.starts, protocol="tcp")
    decode = DecodeManager(memory.pool, SPACE, SECRET, patience=PATIENCE, engine=landing)
    decode.receiver(2, url, 64 * BLOCK_TOKENS).announce(0, OLD)
    process = landing._engine.process
    assert process is not None
    say(str(process._process.pid))
    signal.pause()


def say(words: str) -> None:
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "prefill":
        run_prefill()
    else:
        run_decode(sys.argv[2])
