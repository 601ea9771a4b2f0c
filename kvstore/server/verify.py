"""Verify: read pages again where they lie and compare them with their digests.

Pages are pinned a batch at a time under a lease of the node's own, read and digested in the job's
thread, and let go. What fails is quarantined. Reading goes through the extents' descriptors, not
through a mapping: nothing of it must be unmapped when an extent changes hands.
"""

from collections import defaultdict
from collections.abc import Callable
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
from kvstore.state.sessions import Process, Session
from kvstore.state.slots import Slot
from kvstore.state.tree import Node, Space, is_live

BATCH_BYTES: Final = 32 << 20
BATCH_PAGES: Final = 256
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
    """Checks pages of the host tier against their digests.

    Args:
        turns: takes turns on the state's loop.
    """

    def __init__(self, turns: Turns) -> None:
        """Check nothing yet."""
        self._turns = turns
        self._process = Process(-1, 0, Session(b"", "verify", 1 << 62))
        self._numbers = count(1)

    def page(self, space: Space, node: Node) -> Callable[[Job], None]:
        """Work that checks the pages of one key."""

        def work(job: Job) -> None:
            _begin(job, 1)
            self._check_nodes(job, space, lambda: [node] if is_live(node) else [])

        return work

    def spaces(self, spaces: list[Space]) -> Callable[[Job], None]:
        """Work that checks all pages of some spaces, those included that come meanwhile."""

        def work(job: Job) -> None:
            _begin(job, self._turns.ask(lambda: sum(len(space.nodes) for space in spaces)))
            for space in spaces:
                self._check_space(job, space)

        return work

    def _check_space(self, job: Job, space: Space) -> None:
        cursor = 0
        shelves = space.shelves
        while numbers := self._turns.ask(partial(shelves.numbers, cursor)):
            for number in numbers:
                self._check_nodes(job, space, partial(shelves.nodes, number))
                if job.cancelled:
                    return
            cursor = shelves.after(numbers[-1])

    def _check_nodes(self, job: Job, space: Space, nodes: Callable[[], list[Node]]) -> None:
        """Check the pages of the nodes that ``nodes`` gives, in batches."""

        def listed() -> list[tuple[Node, int]]:
            return [(node, shard) for node in nodes() for shard in node.slots]

        pages = self._turns.ask(listed)
        start = 0
        while start < len(pages) and not job.cancelled:
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
        job.done += len({id(node) for node, _ in pages})

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
            if node.read_once:
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


def _begin(job: Job, total: int) -> None:
    job.total = total
    job.result.update(checked=0, corrupt=0, skipped=0)


def _quarantine(table: PageTable, page: _Page) -> None:
    """Take a page out, if what was read is still what is stored."""
    node = page.node
    if is_live(node) and node.slots.get(page.shard) == page.slot:
        table.drop(node, page.shard, "corrupt")
