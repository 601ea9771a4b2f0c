"""Our index in a process of its own, as a reader in this process sees it."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import numpy as np

from bench.index_feed import MODEL, SPACE, FeedError, keys
from bench.index_fleet import PAGE_TOKENS, Fleet, Prompt, Worker, tokens
from kvstore.index.control import IndexSettings, Source, SourceBounds
from kvstore.index.face import PrefixIndex
from kvstore.index.process import IndexProcess
from kvstore.index.runs import PartNeed, PrefixNeeds
from kvstore.index.scope import ChainValues, key_chains, scope_seed, token_chains
from kvstore.index.table import IndexReader
from kvstore.protocol.page import page_keys

_READY_S: Final = 60.0
_SEEN_S: Final = 300.0
_PAUSE_S: Final = 0.002
_REPLAY_S: Final = 60.0
_VERIFY_S: Final = 3600.0
"""Nobody asks for a batch again that nobody keeps."""
_FOREIGN_BLOCKS: Final = 1 << 20


class Cores(NamedTuple):
    """Which cores are whose; None = any.

    Attributes:
        indexer: of the process that indexes, ours or another's.
        others: of the publisher and of who measures.
    """

    indexer: set[int] | None
    others: set[int] | None

    @classmethod
    def present(cls) -> "Cores":
        """The first core of this machine for the indexer, if there is another one."""
        first, *rest = range(os.cpu_count() or 1)
        return cls({first}, set(rest)) if rest else cls(None, None)


def core_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Memory of a process that is resident, its shared memory included."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class OurIndex:
    """An index process that follows a fleet; a context manager, which ends it.

    Args:
        entries_max: of its table.
    """

    def __init__(self, entries_max: int) -> None:
        bounds = SourceBounds(_REPLAY_S, _VERIFY_S, _FOREIGN_BLOCKS)
        self._index = IndexProcess(IndexSettings(entries_max, bounds))
        self._running: asyncio.Task[None] | None = None
        self._known: IndexReader | None = None

    async def __aenter__(self) -> Self:
        self._running = asyncio.create_task(self._index.run())
        await self.table()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._running is not None, "it was entered"
        self._running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._running

    @property
    def index(self) -> PrefixIndex:
        """As the Conductor has it."""
        return self._index

    @property
    def pid(self) -> int:
        """Of the index process; it is the only child of this one that is one."""
        return _index_process()

    async def table(self, former: IndexReader | None = None) -> IndexReader:
        """Wait for a table to read that is not ``former``.

        Raises:
            FeedError: that takes too long.
        """
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline:
            with contextlib.suppress(FeedError):
                _pin(_index_process())
            table = self._index.present().table
            if table is not None and table is not former:
                return table
            await asyncio.sleep(_PAUSE_S)
        raise FeedError("there is no table to read")

    def follow(self, workers: Sequence[Worker], endpoints: Sequence[Sequence[str]]) -> None:
        """Follow a fleet.

        Args:
            workers: of it.
            endpoints: of each: where its events are, and perhaps its replays.
        """
        for worker, (events, *replay) in zip(workers, endpoints, strict=True):
            source = Source(
                worker=worker.name, domain=MODEL, endpoint=events,
                block_tokens=PAGE_TOKENS if worker.kind == "tokens" else 0,
                replay_endpoint=replay[0] if replay else None,
            )  # fmt: skip
            self._index.follow(source)

    async def wait_current(self, workers: int) -> None:
        """Wait until the pages of so many workers count.

        Raises:
            FeedError: that takes too long.
        """
        deadline = time.monotonic() + _READY_S
        while sum(one.current for one in self._index.present().report.workers) < workers:
            if time.monotonic() > deadline:
                raise FeedError(f"not everybody is followed: {self._index.present().report}")
            await asyncio.sleep(_PAUSE_S)

    async def wait_seen(self, seen: Callable[[], bool]) -> int:
        """Wait until a reader sees what it asks for; when that was, in ns of the monotonic clock.

        Raises:
            FeedError: that takes too long.
        """
        deadline = time.monotonic() + _SEEN_S
        while not seen():
            if time.monotonic() > deadline:
                raise FeedError(f"not everything is seen: {self._index.present().report}")
            await asyncio.sleep(_PAUSE_S)
        return time.monotonic_ns()

    def kill(self) -> int:
        """Kill the process; when that was, in ns of the monotonic clock."""
        os.kill(self.pid, signal.SIGKILL)
        return time.monotonic_ns()


def _index_process() -> int:
    """The child of this process that is an index process.

    Raises:
        FeedError: there is none.
    """
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for child in children:
        with contextlib.suppress(OSError):
            if b"kvstore.index.child" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    raise FeedError("there is no index process")


def _pin(pid: int) -> None:
    cores = Cores.present().indexer
    if cores is not None and os.sched_getaffinity(pid) != cores:
        os.sched_setaffinity(pid, cores)


class Scopes(NamedTuple):
    """Seeds of the chains in one table."""

    engines: int
    nodes: int

    @classmethod
    def of(cls, table: IndexReader) -> "Scopes":
        """Those of a table."""
        return cls(
            scope_seed(table.secret, "tokens", MODEL, PAGE_TOKENS),
            scope_seed(table.secret, "keys", SPACE),
        )

    def chains(self, worker: Worker, prompt: Prompt) -> ChainValues:
        """Chain values of a prompt as a worker announces it."""
        if worker.kind == "keys":
            return key_chains(keys(prompt), self.nodes)
        return token_chains(tokens(prompt).ravel(), PAGE_TOKENS, self.engines)


class LastBlocks:
    """The last block of every worker, as a reader asks for them.

    Args:
        table: to read.
        fleet: whose blocks.
    """

    def __init__(self, table: IndexReader, fleet: Fleet) -> None:
        self._table = table
        self._workers = fleet.workers()
        scopes = Scopes.of(table)
        lasts = [scopes.chains(one, fleet.last(one))[-1] for one in self._workers]
        self._chains = np.array(lasts, np.uint64)

    def seen(self) -> bool:
        """Whether each of them is there, at its worker."""
        directory = self._table.holders()
        bits = {holder.worker: bit for holder, bit in directory.holders.items()}
        if any(worker.name not in bits for worker in self._workers):
            return False
        found = self._table.find(self._chains)
        if found.version != directory.version:
            return False
        rows = found.rows[np.searchsorted(found.ends, np.arange(len(self._chains)), "right")]
        for row, worker in zip(rows, self._workers, strict=True):
            bit = bits[worker.name]
            if not int(row[bit // 64]) >> bit % 64 & 1:
                return False
        return True


class Match:
    """What a prompt's owner asks: how much of it each worker has.

    Args:
        table: to read.
        fleet: whose workers; they share a document, which is the prompt.
    """

    def __init__(self, table: IndexReader, fleet: Fleet) -> None:
        self._table = table
        self._scopes = Scopes.of(table)
        self._tokens = tokens(fleet.document()).ravel()
        self._by_tokens = self._chains_of_tokens()
        self._keys = keys(fleet.document())
        held = table.holders().by_worker
        self._engines = fleet.engines
        self._needs = PrefixNeeds([[PartNeed(held[one.name])] for one in fleet.workers()])

    def _chains_of_tokens(self) -> ChainValues:
        return token_chains(self._tokens, PAGE_TOKENS, self._scopes.engines)

    def prefixes(self) -> list[int]:
        """Pages of each worker, engines first; keys and chains of the prompt are known."""
        return self._matched(self._by_tokens, self._keys)

    def of_tokens(self) -> list[int]:
        """The same from the prompt's tokens."""
        packed = page_keys(self._tokens, PAGE_TOKENS).packed
        return self._matched(self._chains_of_tokens(), packed)

    def _matched(self, engines: ChainValues, packed: bytes) -> list[int]:
        of_nodes = key_chains(packed, self._scopes.nodes)
        at_engines, at_nodes = self._table.match([engines, of_nodes], self._needs)
        return [*at_engines[: self._engines].tolist(), *at_nodes[self._engines :].tolist()]
