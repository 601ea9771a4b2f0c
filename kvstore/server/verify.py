"""Verify: read pages again where they lie and compare them with their digests.

On disk the state reads them, a few at a time (:mod:`kvstore.state.diskchecks`); the job's thread
hands it one stretch of pages after the other and waits. In memory pages are pinned a batch at a
time under a lease of the node's own, read and digested in the job's thread, and let go; through
the extents' descriptors, not through a mapping: nothing of it must be unmapped when an extent
changes hands. What fails is quarantined.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from time import monotonic_ns
from typing import Final

import numpy as np

from kvstore import mover
from kvstore.errors import TierUnavailable
from kvstore.page import digest_seed, page_seeds
from kvstore.server.api import Turns
from kvstore.server.jobs import Job
from kvstore.state.pages import PageTable
from kvstore.state.sessions import Peer, Process, Session
from kvstore.state.shelves import Shelves
from kvstore.state.slots import Slot
from kvstore.state.tree import Node, Space, is_live

BATCH_BYTES: Final = 32 << 20
BATCH_PAGES: Final = 256
_POLL_S: Final = 0.01
_LEASE_NS: Final = 60 * 1_000_000_000


@dataclass(frozen=True, slots=True)
class _Page:
    """One page to check; ``extent`` and ``offset`` are valid while the batch's lease stands."""

    node: Node
    shard: int
    slot: Slot
    digest: bytes
    extent: int
    offset: int


class Verifier:
    """Checks pages against their digests, in the tiers where they are.

    Args:
        turns: takes turns on the state's loop.
    """

    def __init__(self, turns: Turns) -> None:
        """Check nothing yet."""
        self._turns = turns
        self._process = Process(-1, Peer(0), Session(b"", "verify", 1 << 62))
        self._numbers = count(1)

    def page(self, node: Node, tiers: Sequence[str], deadline_ns: int) -> Callable[[Job], None]:
        """Work that checks the pages of one key."""

        def work(job: Job) -> None:
            pages = self._turns.ask(lambda: _listed([node], tiers))
            scan = _Scan(job, tiers, deadline_ns, len(pages))
            self._check_nodes(scan, node.space, lambda: [node] if is_live(node) else [])

        return work

    def spaces(
        self, spaces: list[Space], tiers: Sequence[str], deadline_ns: int
    ) -> Callable[[Job], None]:
        """Work that checks all pages of some spaces, those included that come meanwhile."""

        def work(job: Job) -> None:
            scan = _Scan(job, tiers, deadline_ns, sum(self._count(one, tiers) for one in spaces))
            for space in spaces:
                self._check_space(scan, space)

        return work

    def _count(self, space: Space, tiers: Sequence[str]) -> int:
        """The pages of a space in some tiers, counted a shelf in a turn."""
        total, shelves = 0, space.shelves
        for number in self._turns.ask(partial(shelves.numbers, 0)):
            total += len(self._turns.ask(partial(_listed_of, shelves, number, tiers)))
        return total

    def _check_space(self, scan: "_Scan", space: Space) -> None:
        cursor = 0
        shelves = space.shelves
        while numbers := self._turns.ask(partial(shelves.numbers, cursor)):
            for number in numbers:
                if scan.over():
                    return
                self._check_nodes(scan, space, partial(shelves.nodes, number))
            cursor = shelves.after(numbers[-1])

    def _check_nodes(self, scan: "_Scan", space: Space, nodes: Callable[[], list[Node]]) -> None:
        """Check the pages of the nodes that ``nodes`` gives, tier by tier."""
        if "host" in scan.tiers:
            pages = self._turns.ask(lambda: _listed(nodes(), ["host"]))
            self._check_memory(scan, space, pages)
        if "ssd" in scan.tiers:
            self._check_disk(scan, self._turns.ask(lambda: _listed(nodes(), ["ssd"])))

    def _check_disk(self, scan: "_Scan", pages: list[tuple[Node, int]]) -> None:
        """Have the state read a stretch of pages on disk, and wait for it."""
        disk = self._turns.observed.node.pages.disk
        assert disk is not None
        run = self._turns.operate(lambda _table: disk.check(pages))
        result, done = scan.job.result, scan.job.done
        before = dict(result)
        try:
            while not self._turns.ask(lambda: run.finished) and not scan.over():
                scan.job.done = done + run.ended
                scan.job.pause(_POLL_S)
        finally:
            self._turns.tell(lambda _table: run.cancel())
        for name in ("checked", "corrupt", "unreadable", "skipped"):
            result[name] = before[name] + getattr(run, name)
        scan.job.done = done + run.ended

    def _check_memory(self, scan: "_Scan", space: Space, pages: list[tuple[Node, int]]) -> None:
        """Check pages in memory, in batches."""
        job, start = scan.job, 0
        while start < len(pages) and not scan.over():
            before = start
            take = partial(self._take, job=job, space=space, pages=pages, start=start)
            lease, taken, start = self._turns.operate(take)
            try:
                wrong = self._wrong(space, taken)
            finally:
                self._turns.tell(partial(self._give_back, lease=lease))
            for page in wrong:
                self._turns.operate(partial(_quarantine, page=page))
            job.result["checked"] += len(taken)
            job.result["corrupt"] += len(wrong)
            job.done += start - before

    def _give_back(self, table: PageTable, lease: int) -> None:
        table.release(self._process, lease)

    def _take(
        self, table: PageTable, job: Job, space: Space, pages: list[tuple[Node, int]], start: int
    ) -> tuple[int, list[_Page], int]:
        """Pin the next batch; on the state's loop. Returns the lease, the pages, and the end."""
        taken: list[_Page] = []
        size, at = 0, start
        while at < len(pages) and len(taken) < BATCH_PAGES and size < BATCH_BYTES:
            node, shard = pages[at]
            at += 1
            if not is_live(node) or shard not in node.slots or not node.ready >> shard & 1:
                continue
            if node.read_once >> shard & 1:
                job.result["skipped"] += 1  # releasing it would be its one reading
                continue
            slot = node.slots[shard]
            extent, _, offset = table.slots.address(slot)
            taken.append(_Page(node, shard, slot, node.digests[shard], extent, offset))
            size += space.shards[shard].page_bytes
        lease = next(self._numbers)
        held = [(page.node, page.shard) for page in taken]
        table.lend(self._process, lease, held, monotonic_ns() + _LEASE_NS)
        return lease, taken, at

    def _wrong(self, space: Space, pages: list[_Page]) -> list[_Page]:
        """The pages whose bytes are not those of their digests."""
        by_shard: dict[int, list[_Page]] = defaultdict(list)
        for page in pages:
            by_shard[page.shard].append(page)
        wrong: list[_Page] = []
        memory = self._turns.observed.memory
        for shard, members in by_shard.items():
            spec, size = space.shards[shard].spec, space.shards[shard].page_bytes
            rows = np.empty((len(members), size), dtype=np.uint8)
            for row, page in zip(rows, members, strict=True):
                if memory.read(page.extent, page.offset, row.data) != size:
                    raise TierUnavailable(f"extent {page.extent} is shorter than its pages")
            packed = b"".join(page.node.key for page in members)
            first, step = rows.ctypes.data, rows.strides[0]
            addresses = np.arange(len(members), dtype=np.uint64) * np.uint64(step) + np.uint64(
                first
            )
            seeds = page_seeds(packed, digest_seed(space.identity, spec))
            found = mover.digest(addresses, size, seeds)
            wrong += [
                page
                for page, digest in zip(members, found, strict=True)
                if digest.tobytes() != page.digest
            ]
        return wrong


class _Scan:
    """One job's walk; counts in the job's result.

    Args:
        job: whose.
        tiers: ``host``, ``ssd`` or both.
        deadline_ns: nothing is begun later; then the result says that it is not ``complete``.
        total: pages there are to check, as far as is known.
    """

    def __init__(self, job: Job, tiers: Sequence[str], deadline_ns: int, total: int) -> None:
        self.job = job
        self.tiers = tiers
        self._deadline_ns = deadline_ns
        job.total = total
        job.result.update(checked=0, corrupt=0, unreadable=0, skipped=0)

    def over(self) -> bool:
        """Whether to begin nothing more."""
        late = monotonic_ns() >= self._deadline_ns
        if late or self.job.cancelled:
            self.job.result["complete"] = False
        return late or self.job.cancelled


def _listed_of(shelves: Shelves, number: int, tiers: Sequence[str]) -> list[tuple[Node, int]]:
    return _listed(shelves.nodes(number), tiers)


def _listed(nodes: list[Node], tiers: Sequence[str]) -> list[tuple[Node, int]]:
    """The pages of some nodes in some tiers; one that is in both tiers is listed twice."""
    pages = [(node, shard) for node in nodes for shard in node.slots if "host" in tiers]
    return pages + [(node, shard) for node in nodes for shard in node.disk if "ssd" in tiers]


def _quarantine(table: PageTable, page: _Page) -> None:
    """Take a page out, if what was read is still what is stored."""
    node = page.node
    if is_live(node) and node.slots.get(page.shard) == page.slot:
        table.drop(node, page.shard, "corrupt")
