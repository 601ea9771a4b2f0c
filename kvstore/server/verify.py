"""Verify: reads pages again in their tiers and compares them with their digests.

Pages on disk are read by the state code, a few at a time (:mod:`kvstore.state.disk.checks`); the
job passes it one part after another and waits. Pages in memory are pinned in batches under the
node's own lease, read and digested in a thread, and released. They are read through the extents'
descriptors instead of a mapping, so that nothing has to be unmapped when an extent is reassigned.
Pages that fail are quarantined.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from time import monotonic_ns
from typing import Final

import numpy as np

from kvstore import mover
from kvstore.protocol.errors import TierUnavailable
from kvstore.protocol.page import digest_seed, page_seeds
from kvstore.server.jobs import OperatorJob
from kvstore.server.turns import Work
from kvstore.state.table.pages import PageTable
from kvstore.state.tree.node import PrefixNode, is_live
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.sessions import Peer, Process, Session
from kvstore.state.tree.slots import Slot
from kvstore.tier.host import HostMemory

BATCH_BYTES: Final = 32 << 20
BATCH_PAGES: Final = 128
_STEP_PAGES: Final = 1024
_POLL_S: Final = 0.002
_LEASE_NS: Final = 60 * 1_000_000_000


@dataclass(frozen=True, slots=True)
class _Page:
    """One page to check; ``extent`` and ``offset`` are valid while the batch's lease is held."""

    node: PrefixNode
    shard: int
    slot: Slot
    digest: bytes
    extent: int
    offset: int


class Verifier:
    """Checks pages against their digests, in their tiers.

    Args:
        table: the page table.
        memory: the bytes of the host tier.
    """

    def __init__(self, table: PageTable, memory: HostMemory) -> None:
        self._table = table
        self._memory = memory
        self._process = Process(-1, Peer(0), Session(b"", "verify", 1 << 62))
        self._numbers = count(1)
        self._thread = _reading()

    def close(self) -> None:
        """Stop reading; waits for the current batch."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def page(
        self, node: PrefixNode, tiers: Sequence[str], deadline_ns: int
    ) -> Callable[[OperatorJob], Work[None]]:
        """Work that checks the pages of one key."""

        def work(job: OperatorJob) -> Work[None]:
            total = len(_listed([node], tiers)) if is_live(node) else 0
            yield from self._check_nodes(_Scan(job, tiers, deadline_ns, total), [node])

        return work

    def spaces(
        self, spaces: list[PrefixTree], tiers: Sequence[str], deadline_ns: int
    ) -> Callable[[OperatorJob], Work[None]]:
        """Work that checks all pages of some spaces, including pages stored meanwhile."""

        def work(job: OperatorJob) -> Work[None]:
            scan = _Scan(job, tiers, deadline_ns, 0)
            for space in spaces:
                yield from _count(scan, space)
            for space in spaces:
                yield from self._check_space(scan, space)

        return work

    def _check_space(self, scan: "_Scan", space: PrefixTree) -> Work[None]:
        order, cursor = space.by_creation, 0
        step = max(1, _STEP_PAGES // max(1, len(space.shards)))
        while numbers := order.numbers(cursor):
            for number in numbers:
                if scan.over():
                    return
                if "host" in scan.tiers:
                    nodes = [node for node in order.nodes(number) if node.memory]
                    singles = [page for node in nodes for page in node.singles()]
                    for start in range(0, len(singles), step):
                        some = filter(is_live, singles[start : start + step])
                        yield from self._check_memory(scan, _listed(some, ["host"]))
                if "ssd" in scan.tiers:
                    runs = [
                        (node, shard)
                        for node in order.nodes(number)
                        for shard in node.place_columns
                    ]
                    yield from self._check_disk(scan, runs)
            cursor = order.after(numbers[-1])
            yield None

    def _check_nodes(self, scan: "_Scan", nodes: list[PrefixNode]) -> Work[None]:
        """Check the pages of some nodes of one space, tier by tier."""
        if "host" in scan.tiers:
            yield from self._check_memory(scan, _listed(filter(is_live, nodes), ["host"]))
        if "ssd" in scan.tiers:
            yield from self._check_disk(scan, _listed(filter(is_live, nodes), ["ssd"]))

    def _check_disk(self, scan: "_Scan", pages: list[tuple[PrefixNode, int]]) -> Work[None]:
        """Pass some pages on disk to the state code, and wait."""
        if not pages:
            return
        run = self._table.disk.check(pages)
        done = scan.job.done
        try:
            while not run.finished and not scan.over():
                scan.job.done = done + run.ended
                yield _POLL_S
        finally:
            run.cancel()
        scan.add("checked", run.checked)
        scan.add("corrupt", run.corrupt)
        scan.add("unreadable", run.unreadable)
        scan.add("skipped", run.skipped)
        scan.job.done = done + run.ended

    def _check_memory(self, scan: "_Scan", pages: list[tuple[PrefixNode, int]]) -> Work[None]:
        """Check pages in memory, in batches."""
        start = 0
        while start < len(pages) and not scan.over():
            before = start
            lease, taken, start = self._take(scan, pages, start)
            try:
                reading = self._begin(taken)
                while not reading.done():
                    yield _POLL_S
            finally:
                self._table.release(self._process, lease)
            wrong = reading.result()
            for page in wrong:
                if is_live(page.node) and page.node.slots.get(page.shard) == page.slot:
                    self._table.residents.drop(page.node, page.shard, "corrupt")
            scan.add("checked", len(taken))
            scan.add("corrupt", len(wrong))
            scan.job.done += start - before
            yield None

    def _begin(self, pages: list[_Page]) -> Future[list[_Page]]:
        """Start to read and digest pinned pages.

        Raises:
            TierUnavailable: no thread can be started.
        """
        try:
            return self._thread.submit(_wrong, self._memory, pages)
        except RuntimeError as error:  # no more threads; but this one has kept the call for later
            self._thread = _reading()
            raise TierUnavailable(
                f"pages in memory cannot be read now: {error}: raise ulimit -u, or the limit of"
                " tasks of the service or container, and verify again"
            ) from error

    def _take(
        self, scan: "_Scan", pages: list[tuple[PrefixNode, int]], start: int
    ) -> tuple[int, list[_Page], int]:
        """Pin the next batch; returns the lease, the pages, and where the batch ends."""
        table = self._table
        taken: list[_Page] = []
        size, at = 0, start
        while at < len(pages) and len(taken) < BATCH_PAGES and size < BATCH_BYTES:
            node, shard = pages[at]
            at += 1
            if not is_live(node) or shard not in node.slots or not node.ready >> shard & 1:
                continue
            if node.read_once >> shard & 1:
                scan.add("skipped", 1)  # releasing it would count as its only read
                continue
            slot = node.slots[shard]
            extent, _, offset = table.slots.address(slot)
            taken.append(_Page(node, shard, slot, node.digests[shard], extent, offset))
            size += node.space.shards[shard].page_bytes
        lease = next(self._numbers)
        held = [(page.node, page.shard) for page in taken]
        if held:
            table.lend(self._process, lease, held, monotonic_ns() + _LEASE_NS)
        return lease, taken, at


class _Scan:
    """The walk of one job; counts in the job's result.

    Args:
        job: the job.
        tiers: ``host``, ``ssd`` or both.
        deadline_ns: nothing is started later; then ``complete`` is false in the result.
        total: estimated number of pages to check.
    """

    def __init__(
        self, job: OperatorJob, tiers: Sequence[str], deadline_ns: int, total: int
    ) -> None:
        self.job = job
        self.tiers = tiers
        self._counts = dict.fromkeys(("checked", "corrupt", "unreadable", "skipped"), 0)
        self._deadline_ns = deadline_ns
        job.total = total
        job.result.update(self._counts)

    def add(self, name: str, more: int) -> None:
        """Count pages."""
        self._counts[name] += more
        self.job.result[name] = self._counts[name]
        self.job.pages = self._counts["checked"]

    def over(self) -> bool:
        """Whether to stop."""
        late = monotonic_ns() >= self._deadline_ns
        if late or self.job.cancelled:
            self.job.result["complete"] = False
        return late or self.job.cancelled


def _reading() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "kvstore-verify")


def _count(scan: _Scan, space: PrefixTree) -> Work[None]:
    """Count the pages of a space in the chosen tiers."""
    for number in space.by_creation.numbers(0):
        nodes = space.by_creation.nodes(number)
        if "host" in scan.tiers:
            scan.job.total += sum(node.count * len(node.slot_columns) for node in nodes)
        if "ssd" in scan.tiers:
            scan.job.total += sum(node.count * len(node.place_columns) for node in nodes)
        yield None


def _listed(nodes: Iterable[PrefixNode], tiers: Sequence[str]) -> list[tuple[PrefixNode, int]]:
    """The pages of some nodes in some tiers; a page in both tiers is listed twice."""
    every = list(nodes)
    pages = [(node, shard) for node in every for shard in node.slots if "host" in tiers]
    return pages + [(node, shard) for node in every for shard in node.disk if "ssd" in tiers]


def _wrong(memory: HostMemory, pages: list[_Page]) -> list[_Page]:
    """The pages that fail their digests; runs in a thread."""
    by_shard: dict[int, list[_Page]] = defaultdict(list)
    for page in pages:
        by_shard[page.shard].append(page)
    wrong: list[_Page] = []
    for shard, members in by_shard.items():
        space = members[0].node.space
        spec, size = space.shards[shard].spec, space.shards[shard].page_bytes
        rows = np.empty((len(members), size), dtype=np.uint8)
        for row, page in zip(rows, members, strict=True):
            if memory.read(page.extent, page.offset, row.data) != size:
                raise TierUnavailable(f"extent {page.extent} is shorter than its pages")
        packed = b"".join(page.node.key for page in members)
        first, step = rows.ctypes.data, rows.strides[0]
        offsets = np.arange(len(members), dtype=np.uint64) * np.uint64(step)
        seeds = page_seeds(packed, digest_seed(space.identity, spec))
        found = mover.digest(offsets + np.uint64(first), size, seeds)
        pairs = zip(members, found, strict=True)
        wrong += [page for page, digest in pairs if digest.tobytes() != page.digest]
    return wrong
