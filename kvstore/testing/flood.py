"""Stores more pages than the disk can write: measures latency, memory and unsynced pages."""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.client.space import Space
from kvstore.client.store import KVStore
from kvstore.protocol.errors import CapacityError, TransferTimeout
from kvstore.protocol.page import CanonicalLayout, PrefixKeys, ShardSpec, SpaceIdentity
from kvstore.testing.server import Server

MIB: Final = 1 << 20
PAGE_TOKENS: Final = 64
PAGE_BYTES: Final = MIB
PUT_PAGES: Final = 4
PUT_BYTES: Final = PUT_PAGES * PAGE_BYTES
SEGMENT_BYTES: Final = 64 * MIB
WRITERS: Final = 3
"""Number of writers. The first one puts durably and waits for syncs, the others do not."""
TIMEOUT_S: Final = 30.0
_PROMPTS: Final = 1 << 20
"""Prompts per writer, so that no two writers share one."""
_IDENTITY: Final = SpaceIdentity(model="flood", kv_dtype="bfloat16", page_tokens=PAGE_TOKENS)
_SHARD: Final = ShardSpec(layout=CanonicalLayout(head_dim=128), layers=(0, 4), heads=(0, 8))


@dataclass(frozen=True)
class FloodPut:
    """One completed put.

    Attributes:
        prompt: number of its prompt.
        seconds: its duration.
        durable: it was acknowledged as durable.
        room: memory cannot have been full yet.
    """

    prompt: int
    seconds: float
    durable: bool
    room: bool


@dataclass
class Flooded:
    """The result of a flood.

    Attributes:
        puts: puts in the order of completion.
        refused: puts without space or answer in time, which were retried.
        capacity_bytes: size of the node's memory.
        seconds: duration.
        memory_bytes_max: maximum memory in use: shared, plus the growth of the daemon itself.
        stats: the daemon's statistics at the end.
    """

    puts: list[FloodPut] = field(default_factory=list)
    refused: int = 0
    seconds: float = 0.0
    memory_bytes_max: int = 0
    stats: dict[str, Any] = field(default_factory=dict)
    capacity_bytes: int = 0

    @property
    def written_bytes(self) -> int:
        """Bytes that the tier has written."""
        return int(self.stats["ssd"].get("written_bytes", 0))

    def kept(self, capacity_bytes: int) -> list[FloodPut]:
        """Durable puts so recent that the disk cannot have reclaimed them."""
        late: list[FloodPut] = []
        after = 0
        for put in reversed(self.puts):
            after += PUT_BYTES * 2  # records have headers, segments have ends
            if after > capacity_bytes // 2:
                break
            if put.durable:
                late.append(put)
        return late


def settings(folder: Path, memory_bytes: int, disk_bytes: int) -> dict[str, object]:
    """Settings of the daemon: write-back, all pages admitted."""
    return {
        "node.name": f"flood-{os.getpid()}",
        "socket.path": folder / "kv.sock",
        "host.capacity_bytes": memory_bytes,
        "host.extent_bytes": memory_bytes // 8,
        "events.endpoint": "",
        "events.replay_endpoint": "",
        "ssd.directories": folder / "ssd",
        "ssd.capacity_bytes": disk_bytes,
        "ssd.segment_bytes": SEGMENT_BYTES,
        "ssd.sync": "interval",
        "ssd.sync_interval_s": 0.5,
        "ssd.write": "back",
        "ssd.admission": "all",
    }


def open_space(store: KVStore) -> Space:
    """The space of all pages of the flood."""
    space = store.space(_IDENTITY, [_SHARD])
    assert space.page_bytes == (PAGE_BYTES,)
    return space


def prompt_keys(space: Space, prompt: int) -> PrefixKeys:
    """Keys of one put."""
    return space.page_keys(np.arange(PUT_PAGES * PAGE_TOKENS, dtype=np.uint32) + prompt * 256)


def pages_of(keys: PrefixKeys) -> list[npt.NDArray[np.uint8]]:
    """The only correct bytes of a put's pages: each page's key, repeated."""
    return [np.tile(np.frombuffer(key, dtype=np.uint8), PAGE_BYTES // len(key)) for key in keys]


def shared_bytes(server: Server) -> int:
    """Memory that the daemon shares with clients, mapped or not."""
    sizes: dict[int, int] = {}
    for entry in Path(f"/proc/{server.pid}/fd").iterdir():
        try:
            if str(entry.readlink()).startswith("/memfd:kvstore:"):
                status = entry.stat()
                sizes[status.st_ino] = status.st_blocks * 512
        except OSError:
            continue  # closed meanwhile
    return sum(sizes.values())


class Flood:
    """Writers that put new pages as fast as they can.

    Args:
        server: a server that is ready.
        say: called once a second with the second, and the latencies in it in seconds.
        durable: the first writer puts durably.
    """

    def __init__(
        self, server: Server, say: Callable[[int, list[float]], None] = lambda _at, _puts: None,
        *, durable: bool = True,
    ) -> None:  # fmt: skip
        self._server = server
        self._durable = durable
        self._say = say
        self._own_bytes = server.resident_bytes()[0]
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._failed: list[BaseException] = []
        self.result = Flooded(capacity_bytes=server.get("/v1/stats")["host"]["capacity_bytes"])

    def run(self, seconds: float) -> Flooded:
        """Flood for this many seconds.

        Raises:
            Exception: a writer got an error that is not back-pressure.
        """
        begin = time.monotonic()
        writers = [
            threading.Thread(target=self._guarded, args=(index,), name="flood")
            for index in range(WRITERS)
        ]
        for writer in writers:
            writer.start()
        second, seen = 1, 0
        while time.monotonic() < begin + seconds and not self._failed:
            self._over.wait(max(begin + second - time.monotonic(), 0.01))
            own, _ = self._server.resident_bytes()
            memory = shared_bytes(self._server) + max(own - self._own_bytes, 0)
            self.result.memory_bytes_max = max(self.result.memory_bytes_max, memory)
            with self._lock:
                latest = [put.seconds for put in self.result.puts[seen:]]
                seen += len(latest)
            self._say(second, latest)
            second += 1
        self.result.seconds = time.monotonic() - begin
        self.result.stats = self._server.get("/v1/stats")
        self._over.set()
        for writer in writers:
            writer.join(2 * TIMEOUT_S)
        if self._failed:
            raise self._failed[0]
        return self.result

    def _guarded(self, index: int) -> None:
        try:
            self._write(index)
        except BaseException as error:
            self._failed.append(error)
            raise

    def _write(self, index: int) -> None:
        with KVStore.connect(self._server.address, name="flood", timeout_s=TIMEOUT_S) as store:
            space = open_space(store)
            number = 0
            while not self._over.is_set():
                prompt, durable = index * _PROMPTS + number, self._durable and index == 0
                keys = prompt_keys(space, prompt)
                pages = pages_of(keys)
                start = time.monotonic()
                try:
                    space.put(keys, pages, durable=durable)
                except (CapacityError, TransferTimeout):
                    with self._lock:
                        self.result.refused += 1
                    continue
                now = time.monotonic()
                with self._lock:
                    puts = self.result.puts
                    room = (len(puts) + WRITERS) * PUT_BYTES <= self.result.capacity_bytes
                    puts.append(FloodPut(prompt, now - start, durable, room))
                number += 1


def missing_puts(address: str, puts: list[FloodPut]) -> list[int]:
    """Prompts of puts whose pages are missing or not byte-equal."""
    missing = []
    with KVStore.connect(address, name="flood-verify", timeout_s=TIMEOUT_S) as store:
        space = open_space(store)
        out = [np.empty(PAGE_BYTES, dtype=np.uint8) for _ in range(PUT_PAGES)]
        for put in puts:
            keys = prompt_keys(space, put.prompt)
            got = space.get(keys, out=out)
            right = all(map(np.array_equal, out, pages_of(keys)))
            if got < PUT_PAGES or not right:
                missing.append(put.prompt)
    return missing
