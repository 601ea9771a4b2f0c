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

LOADS_TURN: Final = 64
"""Loads that one turn begins; each may have to make room first."""


class DiskLoads:
    """The loads of one node; two who want the same page share one.

    Args:
        memory: the memory side.
        log: which record lies where.
        queue: gets jobs for the tier; :meth:`loaded` is told of its end.
    """

    def __init__(
        self, memory: PageMemory, log: SegmentLog, queue: DiskQueue,
    ) -> None:  # fmt: skip
        self._memory = memory
        self._log = log
        self._queue = queue
        self._loads: dict[tuple[PrefixNode, int], PageLoad] = {}
        #: Fetches of which not all loads are begun, the first one first.
        self._beginning: deque[Fetch] = deque()

    def __len__(self) -> int:
        return len(self._loads)

    def fetch(self, fetch: Fetch, nodes: Sequence[PrefixNode], shard: int) -> None:
        """Load what is on disk only of a run of READY pages, and keep all of it in memory."""
        for node in nodes:
            if node.memory >> shard & 1:
                self._memory.fetches.keep(fetch, node.slots_of(shard))
        fetch.wanted.extend((node, shard) for node in nodes if not node.memory >> shard & 1)
        self._go_on(fetch, LOADS_TURN)
        if fetch.wanted:
            self._beginning.append(fetch)

    @property
    def unfinished(self) -> bool:
        """Whether loads are to be begun in the turns that come."""
        return bool(self._beginning)

    def go_on(self) -> None:
        """Begin more of the loads that somebody waits for, as many as one turn does."""
        left = LOADS_TURN
        while self._beginning and left > 0:
            fetch = self._beginning[0]
            left -= self._go_on(fetch, left)
            if not fetch.wanted:
                self._beginning.popleft()

    def _go_on(self, fetch: Fetch, most: int) -> int:
        """Begin up to ``most`` loads of a fetch; how many pages were looked at."""
        looked = 0
        while fetch.wanted and not fetch.ended and looked < most:
            node, shard = fetch.wanted.popleft()
            looked += 1
            if not node.ready >> shard & 1:
                fetch.wanted.clear()  # it went while room was made for another
            elif node.memory >> shard & 1:
                # somebody else's load has ended
                self._memory.fetches.keep(fetch, [node.slot(shard)])
            else:
                load = self._loads.get((node, shard)) or self._begin(node, shard)
                if load is None:
                    fetch.wanted.clear()
                    break
                load.waiters.append(fetch)
                fetch.outstanding += 1
        if fetch.ended:
            fetch.wanted.clear()
        else:
            self._memory.fetches.tell(fetch)
        return max(1, looked)

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
            self._memory.meter.disk_load.observe(self._memory.now_ns - load.since_ns)
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

    def _begin(self, node: PrefixNode, shard: int) -> PageLoad | None:
        size = node.space.shards[shard].slot_bytes
        assert node.above is not None
        assert not node.memory >> shard & 1
        slots = self._memory.allocate(node.space, node.above, size, 1)
        place = node.place(shard) if node.on_disk >> shard & 1 else None
        if not slots or place is None:  # making room may have cost the page itself
            self._memory.slots.abort(slots)
            return None
        assert (node, shard) not in self._loads
        self._log.pin_segment(place.segment)
        job = DiskRead(self._queue.number(), place, page_name(node, shard), slots[0], node)
        load = self._loads[node, shard] = PageLoad(self._memory.now_ns)
        self._queue.submit(job)
        return load
