"""Pages on their way from the SSD log to memory, and who waits for them. Pure."""

from collections import deque
from collections.abc import Sequence
from typing import Final

from kvstore.errors import KVStoreError, PageCorrupt
from kvstore.state.disk.jobs import DiskRead, PageLoad, PageMemory, page_name
from kvstore.state.disk.log import SegmentLog
from kvstore.state.disk.queue import DiskQueue
from kvstore.state.tree.node import PrefixNode, is_live
from kvstore.state.tree.sessions import Fetch
from kvstore.state.tree.slots import Slot

LOADS_TURN: Final = 64
"""Loads that one turn begins; each may have to make room first."""


class DiskLoads:
    """The loads of one node; two who want the same page share one.

    Args:
        memory: the memory side.
        log: which record lies where.
        queue: gets jobs for the tier; :meth:`loaded` is told of its end.

    Attributes:
        beginning: fetches of which not all loads are begun, the first one first.
    """

    def __init__(
        self, memory: PageMemory, log: SegmentLog, queue: DiskQueue,
    ) -> None:  # fmt: skip
        self._memory = memory
        self._log = log
        self._queue = queue
        self._loads: dict[tuple[PrefixNode, int], PageLoad] = {}
        self.beginning: deque[Fetch] = deque()

    def __len__(self) -> int:
        return len(self._loads)

    def add(self, fetch: Fetch, nodes: Sequence[PrefixNode], shard: int) -> None:
        """A fetch wants a run of READY pages: those in memory stay there, the others are loaded."""
        for node in nodes:
            if node.memory >> shard & 1:
                self._memory.fetches.keep(fetch, node.slots_of(shard))
        fetch.wanted.extend((node, shard) for node in nodes if not node.memory >> shard & 1)

    @property
    def unfinished(self) -> bool:
        """Whether loads are to be begun in the turns that come."""
        return bool(self.beginning)

    def next(self, fetch: Fetch) -> tuple[PrefixNode, int] | None:
        """Look at the next page that a fetch wants: is it to be loaded, to a slot of its own?

        Returns:
            the page, for which :meth:`begin` is called; None = it came, left, or is being loaded.
        """
        node, shard = fetch.wanted.popleft()
        load = self._loads.get((node, shard))
        if not node.ready >> shard & 1:
            fetch.wanted.clear()  # it went while room was made for another
        elif node.memory >> shard & 1:
            # somebody else's load has ended
            self._memory.fetches.keep(fetch, [node.slot(shard)])
        elif load is None:
            return node, shard
        else:
            load.waiters.append(fetch)
            fetch.outstanding += 1
        return None

    def begin(self, fetch: Fetch, node: PrefixNode, shard: int, slots: Sequence[Slot]) -> None:
        """Load a page to a slot; none, or making room has cost the page: the fetch gets no more."""
        assert not node.memory >> shard & 1
        place = node.place(shard) if node.on_disk >> shard & 1 else None
        if not slots or place is None:
            self._memory.slots.abort(slots)
            fetch.wanted.clear()
            return
        assert (node, shard) not in self._loads
        self._log.pin_segment(place.segment)
        job = DiskRead(self._queue.number(), place, page_name(node, shard), slots[0], node)
        self._loads[node, shard] = PageLoad(self._memory.moment.now_ns, [fetch])
        fetch.outstanding += 1
        self._queue.submit(job)

    def tell(self, fetch: Fetch) -> None:
        """All that can be begun of a fetch now has been: who waits for nothing is resumed."""
        if fetch.ended:
            fetch.wanted.clear()
        else:
            self._memory.fetches.tell(fetch)

    def loaded(self, job: DiskRead, error: KVStoreError | None, tokens: bytes) -> None:
        """A load has ended; the record had these ``tokens``."""
        node, shard, slot = job.node, job.page.shard, job.slot
        load = self._loads.pop((node, shard))
        self._log.unpin_segment(job.place.segment)
        wanted = (
            is_live(node)
            and node.on_disk >> shard & 1
            and not node.memory >> shard & 1  # it left meanwhile, and was stored again
            and node.digests[shard] == job.page.digest
        )
        waiters = [fetch for fetch in load.waiters if not fetch.ended]
        if wanted and error is None:
            self._memory.meter.disk_load.observe(self._memory.moment.now_ns - load.since_ns)
            self._memory.promoted(node, shard, slot, tokens)
            for fetch in waiters:
                self._memory.fetches.keep(fetch, [slot])
            self._memory.add_candidate(node)
        else:
            self._memory.slots.abort([slot])
            if wanted:
                cause = "corrupt" if isinstance(error, PageCorrupt) else "unreadable"
                self._memory.drop(node, shard, cause)
        self._memory.fetches.came(waiters)
