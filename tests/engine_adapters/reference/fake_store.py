"""A store of a few dozen lines: real bytes through real addresses, no verification, no daemon."""

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from kvstore.client.results import Hit, PutResult, RestoreResult
from kvstore.protocol.errors import CapacityError, KVStoreError


@dataclass
class FakeNode:
    """Pages by space and key, shared by the stores of several engines.

    Attributes:
        gate: jobs wait for it before they move a byte; set unless a test clears it.
        error: raised by lookups and puts.
        spoil: a restore writes these bytes' worth of garbage instead of pages and restores none.
        pending_lookups: so many lookups answer that all pages are being written.
        load_seconds: what lookups expect a load to take.
        here: leading pages of a prompt that are here; the others are at another node.
        remote_seconds: what lookups expect a fetch of those to take.
        gone: stored pages beyond this number are not there any more when they are restored.
        told: what each lookup named as a holder.
        kept: name of each conversation that was to be kept, pages of it that were there, pages,
            seconds and bytes.
    """

    pages: dict[bytes, dict[bytes, bytes]] = field(default_factory=dict)
    name: str = "node"
    gate: threading.Event = field(default_factory=threading.Event)
    arrived: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    error: KVStoreError | None = None
    full: bool = False
    spoil: bool = False
    pending_lookups: int = 0
    load_seconds: float = 0.0
    here: int = 1 << 30
    remote_seconds: float = 0.0
    gone: int = 1 << 30
    told: list[tuple[str, int]] = field(default_factory=list)
    kept: list[tuple[str, int, int, float, int]] = field(default_factory=list)
    reported: list[float] = field(default_factory=list)
    puts: list[tuple[int, float, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()


class FakeJob:
    def __init__(self, future: Future[Any], cancelled: threading.Event) -> None:
        self._future = future
        self._cancelled = cancelled

    def wait(self, timeout_s: float) -> bool:
        return bool(wait([self._future], timeout_s).done)

    def cancel(self) -> None:
        self._cancelled.set()

    def result(self, timeout_s: float) -> Any:
        return self._future.result(timeout_s)


class FakeSpace:
    def __init__(self, node: FakeNode, name: bytes, page_bytes: int, pool: ThreadPoolExecutor):
        self._node = node
        self._name = name
        self._page_bytes = page_bytes
        self._pool = pool

    @property
    def _pages(self) -> dict[bytes, bytes]:
        return self._node.pages.setdefault(self._name, {})

    def lookup(self, keys: Any, *, holder: str = "", held: int = 0) -> Hit:
        if self._node.error is not None:
            raise self._node.error
        pages = next((i for i, key in enumerate(keys) if key not in self._pages), len(keys))
        if self._node.pending_lookups:
            self._node.pending_lookups -= 1
            return Hit(0, len(keys))
        self._node.told.append((holder, held))
        here = min(pages, self._node.here)
        load_s, remote_s = self._node.load_seconds, self._node.remote_seconds
        return Hit(here, 0, {}, load_s, pages - here, remote_s if pages > here else 0.0)

    def keep_conversation(self, keys: Any, name: str, ttl_s: float, bytes_max: int) -> None:
        there = sum(key in self._pages for key in keys)
        self._node.kept.append((name, there, len(keys), ttl_s, bytes_max))

    def restore_to_kvpool(self, keys: Any, pool: Any, blocks: Any, shard: int) -> FakeJob:
        assert shard == 0, "engines of several ranks are tested with a real store"

        def run(cancelled: threading.Event) -> RestoreResult:
            if self._node.spoil:
                for number in range(len(blocks)):
                    self._move(pool, blocks, number, b"\xff" * self._page_bytes)
                return RestoreResult(0)
            done = 0
            for key in keys:
                if key not in self._pages or cancelled.is_set() or done >= self._node.gone:
                    break
                self._move(pool, blocks, done, self._pages[key])
                if self._name.endswith(b"handoff"):
                    del self._pages[key]  # read once
                done += 1
            return RestoreResult(done, done * self._page_bytes)

        return self._submit(run)

    def extract_from_kvpool(
        self, pool: Any, blocks: Any, keys: Any, shard: int, *, ttl_s: float, read_once: bool
    ) -> FakeJob:
        assert shard == 0

        def run(cancelled: threading.Event) -> PutResult:
            if self._node.full:
                raise CapacityError("no slot is free")
            stored = 0
            for number, key in enumerate(keys):
                if key not in self._pages:
                    page = bytearray(self._page_bytes)
                    self._move(pool, blocks, number, page, into_pool=False)
                    self._pages[key] = bytes(page)
                    stored += 1
            return PutResult(stored, len(keys) - stored)

        self._node.puts.append((len(keys), ttl_s, read_once))
        return self._submit(run)

    def _submit(self, run: Callable[[threading.Event], Any]) -> FakeJob:
        cancelled = threading.Event()

        def gated() -> Any:
            self._node.arrived.release()
            assert self._node.gate.wait(20.0), "the test never opened the gate"
            return run(cancelled)

        return FakeJob(self._pool.submit(gated), cancelled)

    def _move(
        self,
        pool: Any,
        blocks: Any,
        number: int,
        page: bytes | bytearray,
        *,
        into_pool: bool = True,
    ) -> None:
        """Copy between page ``number`` of ``blocks`` and ``page``, plane by plane."""
        size = pool.block_bytes
        per_page = self._page_bytes // (size * len(pool.planes))
        buffer = (ctypes.c_char * self._page_bytes).from_buffer_copy(page)
        offset = 0
        for plane in pool.planes:
            for block in blocks[number * per_page : (number + 1) * per_page]:
                address = plane + int(block) * pool.block_stride_bytes
                here = ctypes.addressof(buffer) + offset
                ctypes.memmove(*((address, here) if into_pool else (here, address)), size)
                offset += size
        if not into_pool:
            page[:] = buffer.raw


class FakeStore:
    """What an engine holds; the bytes are the node's."""

    def __init__(self, node: FakeNode) -> None:
        self._node = node
        self._workers = ThreadPoolExecutor(4)
        self.troubles: dict[str, int] = {}
        self.node_name = node.name
        self.closed = False

    def space(self, identity: Any, shards: Any) -> FakeSpace:
        if self._node.error is not None:
            raise self._node.error
        name = identity.digest + identity.scope.encode()
        return FakeSpace(self._node, name, shards[0].page_bytes(identity), self._workers)

    def report_prefill(self, seconds_per_token: float) -> None:
        self._node.reported.append(seconds_per_token)

    def close(self) -> None:
        self._workers.shutdown()
        self.closed = True
