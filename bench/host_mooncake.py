"""Pages that this process puts and gets beside Mooncake's, both through shared memory of one host.

``peer/put/8MiB/x16`` is the case ``put/8MiB/x16`` of ``bench host`` with Mooncake's client of the
same host as its bound: a *dummy* client, whose buffers lie in shared memory of the *real* client
beside it. Ours copies and digests, theirs copies; both stores are full, so each put evicts. All
processes are in a network of their own, because Mooncake listens on all interfaces.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from bench import measure, server
from bench.host_pages import MIB, SHAPES, PageCalls, Shape
from bench.measure import Result
from bench.mooncake_alone import results_alone
from kvstore.mover.memory import memory_at

HOST: Final = "127.0.0.1"
MASTER_PORT: Final = 50_051
CLIENT_PORT: Final = 50_052
METRICS_PORT: Final = 50_053
BOUND: Final = "Mooncake's client through shared memory, no digests"
LOCAL_BUFFER_BYTES: Final = 64 * MIB
LEASE_MS: Final = 1_000
"""Of an object that is read: a get that lasts longer fails."""
START_S: Final = 30.0
END_S: Final = 10.0
NO_ROOM: Final = -200
REFUSED_MAX: Final = 200
"""Calls in a row that a full store may refuse."""
_PAUSE_S: Final = 0.02


def names() -> list[str]:
    """All cases, in their order."""
    return [f"peer/{verb}/{shape.name}" for shape in SHAPES for verb in ("put", "get")]


def results(name: str, seconds: float, pool_bytes: int) -> Iterator[Result]:
    """Measure one case, in a process with a network of its own; nothing without Mooncake."""
    words = [name, str(seconds), str(pool_bytes)]
    yield from results_alone("bench.host_mooncake", name, words, timeout_s=10 * seconds + 120)


class MooncakeCalls:
    """The same calls through Mooncake's dummy client.

    Args:
        store: a ``MooncakeDistributedStore`` that is set up.
        shape: what a call moves.
        memory_bytes: of each side in this process; a whole number of calls.
    """

    def __init__(self, store: Any, shape: Shape, memory_bytes: int) -> None:
        self._store = store
        self._shape = shape
        self._sources = self._buffers(memory_bytes)
        self._targets = self._buffers(memory_bytes)
        self._sizes = [shape.page_bytes] * shape.pages
        self._turn = count()
        self._prompts: list[list[str]] = []

    def fill(self) -> None:
        """Store what ``get`` reads, and nothing else: the store may not evict it."""
        self._store.remove_all(force=True)
        self._prompts = [self._stored(buffers)[0] for buffers in self._sources]

    def put(self) -> float:
        """Store pages under new keys; seconds."""
        return self._stored(self._sources[next(self._turn) % len(self._sources)])[1]

    def get(self) -> float:
        """Copy stored pages into buffers; seconds."""
        turn = next(self._turn) % len(self._prompts)
        keys, buffers = self._prompts[turn], self._targets[turn]
        start = time.perf_counter()
        ended = self._store.batch_get_into(keys, buffers, self._sizes)
        seconds = time.perf_counter() - start
        assert set(ended) == {self._shape.page_bytes}, f"Mooncake did not read all pages: {ended}"
        return seconds

    def _stored(self, buffers: list[int]) -> tuple[list[str], float]:
        """Put a call's pages; their keys and seconds.

        A full store refuses puts until it has evicted. Such a call is made again and not counted.
        """
        for _ in range(REFUSED_MAX):
            keys = [os.urandom(16).hex() for _ in buffers]
            start = time.perf_counter()
            ended = self._store.batch_put_from(keys, buffers, self._sizes)
            seconds = time.perf_counter() - start
            if not any(ended):
                return keys, seconds
            assert set(ended) <= {0, NO_ROOM}, f"Mooncake did not store all pages: {ended}"
            time.sleep(_PAUSE_S)
        raise TimeoutError(f"Mooncake refused {REFUSED_MAX} calls, the last with {set(ended)}")

    def _buffers(self, memory_bytes: int) -> list[list[int]]:
        first = self._store.alloc_from_mem_pool(memory_bytes)
        assert first, "Mooncake has no memory for the buffers"
        status = self._store.register_buffer(first, memory_bytes)
        assert status == 0, f"Mooncake does not register the buffers: {status}"
        np.frombuffer(memory_at(first, memory_bytes), np.uint8)[:] = measure.prefaulted(
            memory_bytes
        )
        size, pages = self._shape.page_bytes, self._shape.pages
        each = [first + at * size for at in range(memory_bytes // size)]
        return [each[at : at + pages] for at in range(0, len(each), pages)]


@contextmanager
def running(folder: Path, pool_bytes: int, buffer_bytes: int) -> Iterator[Any]:
    """Mooncake's master and real client, and a dummy client of this process, until the block ends.

    Args:
        folder: where both write what they say.
        pool_bytes: memory for pages.
        buffer_bytes: memory for buffers of this process.
    """
    from mooncake import store as mooncake_store

    programs = Path(mooncake_store.__file__).parent
    master: list[str | Path] = [
        programs / "mooncake_master", f"--port={MASTER_PORT}", f"--metrics_port={METRICS_PORT}",
        f"--default_kv_lease_ttl={LEASE_MS}",
    ]  # fmt: skip
    client: list[str | Path] = [
        programs / "mooncake_client", f"--host={HOST}", f"--port={CLIENT_PORT}",
        f"--master_server_address={HOST}:{MASTER_PORT}", "--metadata_server=P2PHANDSHAKE",
        f"--global_segment_size={pool_bytes}", "--protocol=tcp",
    ]  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(_child(master, folder / "master.log", MASTER_PORT))
        stack.enter_context(_child(client, folder / "client.log", CLIENT_PORT))
        store = mooncake_store.MooncakeDistributedStore()
        status = store.setup_dummy(buffer_bytes, LOCAL_BUFFER_BYTES, f"{HOST}:{CLIENT_PORT}")
        assert status == 0, f"Mooncake's dummy client: {status}"
        yield store
        store.close()


@contextmanager
def _child(program: list[str | Path], log: Path, port: int) -> Iterator[None]:
    """Run a program until the block ends, from when it listens at the port."""
    with log.open("wb") as opened:
        child = subprocess.Popen(
            program, stdin=subprocess.DEVNULL, stdout=opened, stderr=subprocess.STDOUT
        )
        try:
            until_s = time.monotonic() + START_S
            while not _listens(port):
                if child.poll() is not None or time.monotonic() > until_s:
                    raise server.NodeError(f"{program[0]} does not start: {log.read_text()[-500:]}")
                time.sleep(_PAUSE_S)
            yield
        finally:
            child.kill()
            child.wait(END_S)


def _listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex((HOST, port)) == 0


def measured(name: str, seconds: float, pool_bytes: int) -> Result:
    """Measure one case in this process."""
    _, verb, shape_name = name.split("/", 2)
    shape = next(one for one in SHAPES if one.name == shape_name)
    fitting = pool_bytes // 2 // shape.call_bytes * shape.call_bytes
    memory_bytes = min(measure.working_set_bytes(shape.call_bytes), fitting)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-"))
        theirs_store = stack.enter_context(
            running(Path(folder), pool_bytes, 2 * memory_bytes + LOCAL_BUFFER_BYTES)
        )
        address = stack.enter_context(server.running(pool_bytes))
        store = stack.enter_context(server.connected(address))
        server.wait_populated(store, pool_bytes)
        ours = PageCalls(store, shape, memory_bytes)
        theirs = MooncakeCalls(theirs_store, shape, memory_bytes)
        for _ in range(pool_bytes // shape.call_bytes):
            ours.put()
            theirs.put()  # from here on both are full and all memory is touched
        if verb == "get":
            ours.fill()
            theirs.fill()
        case: Callable[[], float] = getattr(ours, verb)
        bound: Callable[[], float] = getattr(theirs, verb)
        found = measure.interleave(case, bound, min_seconds=seconds)
    return measure.throughput(name, shape.call_bytes, found, BOUND)


if __name__ == "__main__":
    found = measured(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.buffer.write(msgspec.json.encode([found]))
