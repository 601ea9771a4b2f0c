"""Loads of pages from the SSD log to memory, and the fetches that wait for them. Pure.

Pages that are one run on disk are loaded as one, with a job for each record, and become READY
together once the last record is read. A load names its pages by key: before it ends, their node may
be split, or they may be dropped or stored again.

Slots of pages that are being loaded belong to nobody else, even if nobody waits for them any more:
their bytes are limited, so that a disk that hangs leaves memory to others. Of a stretch that does
not fit now, as much begins as does: all of it might never fit while one read hangs. The first fetch
that is refused, as not even one page fits, goes on before all others once enough loads have ended;
until then no other load begins.
"""

from collections.abc import Sequence
from typing import Final

from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.page import DIGEST_BYTES, KEY_BYTES, PrefixKey
from kvstore.state.disk.jobs import (
    DiskRead,
    DiskRules,
    PageLoad,
    PageMemory,
    PageRecord,
    RecordOf,
)
from kvstore.state.disk.log import SegmentLog
from kvstore.state.disk.queue import DiskQueue
from kvstore.state.tree.columns import unpack_places
from kvstore.state.tree.node import PrefixNode, is_live
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.sessions import Fetch
from kvstore.state.tree.slots import Slot

LOADS_TURN: Final = 64
"""Maximum pages whose loads one turn starts; each may have to make room first."""
BYTES_SHARE: Final = 4
"""Maximum bytes of loads in flight, in those of writes: somebody waits for each load."""


class DiskLoads:
    """The loads of one node; fetches of the same page share one.

    Args:
        memory: the memory side.
        log: the places of records.
        rules: the limit of bytes in flight.
        queue: gets jobs for the tier; :meth:`loaded` gets their ends.

    Attributes:
        beginning: fetches whose loads have not all begun, the first one first.
        in_flight_bytes: bytes of the slots of all loads that have not ended.
    """

    def __init__(
        self, memory: PageMemory, log: SegmentLog, rules: DiskRules, queue: DiskQueue
    ) -> None:
        self._memory = memory
        self._log = log
        self._rules = rules
        self._queue = queue
        #: Number of the space, shard and key of each page that is being loaded → its load.
        self._by_page: dict[tuple[int, int, PrefixKey], PageLoad] = {}
        #: Job → its load, and which page of that it reads.
        self._by_job: dict[int, tuple[PageLoad, int]] = {}
        self.beginning = memory.fetches.beginning
        self.in_flight_bytes = 0
        #: The first one in ``beginning``, if it was refused since it last began a load; its bytes.
        self._refused: tuple[Fetch | None, int] = (None, 0)

    def __len__(self) -> int:
        return len(self._by_page)

    @property
    def first(self) -> Fetch | None:
        """The first one in ``beginning``."""
        return next(iter(self.beginning), None)

    @property
    def may_go_on(self) -> bool:
        """Whether a fetch in ``beginning`` may begin loads now, rather than when others end."""
        refused, size_bytes = self._refused
        first = self.first
        return first is not None and (first is not refused or self._fits(size_bytes))

    def add(self, fetch: Fetch, nodes: Sequence[PrefixNode], shard: int) -> None:
        """Fetch a run of READY pages: those in memory are pinned there, the others are loaded."""
        assert not fetch.ended
        missing: list[bytes] = []
        for node in nodes:
            assert node.ready >> shard & 1, node
            if node.memory >> shard & 1:
                self._memory.fetches.keep(fetch, node.slots_of(shard))
            else:
                missing.append(node.keys)
        if missing:
            fetch.wanted.append((nodes[0].space, shard, b"".join(missing)))

    def next(self, fetch: Fetch, most: int) -> tuple[int, PrefixNode | None, int] | None:
        """The next pages that a fetch wants: must they be loaded?

        Args:
            fetch: the fetch.
            most: maximum pages to examine.

        Returns:
            how many pages were examined; the node with exactly these if they must be loaded (call
            :meth:`begin`), None = they are in memory, dropped, or being loaded already; the shard.
            None = the next one must wait until loads end.
        """
        assert not fetch.ended, "nobody would unpin its pages"
        space, shard, packed = fetch.wanted.popleft()
        key = PrefixKey(packed[:KEY_BYTES])
        node = space.index.get(key)
        if node is None or not node.ready >> shard & 1:
            fetch.wanted.clear()  # it went while room was made for another
            return 1, None, shard
        load = self._by_page.get((space.number, shard, key))
        offset = node.position(key)
        pages = min(node.matching(offset, packed, 0), most)
        found: PrefixNode | None = None
        if node.memory >> shard & 1:
            # somebody else's load has ended
            self._memory.fetches.keep(fetch, space.exact(node, offset, pages).slots_of(shard))
        elif load is not None:
            pages = load.matching(key, packed)
            load.waiters.append(fetch)
            fetch.outstanding += 1
        else:
            each = space.shards[shard].slot_bytes
            pages = min(pages, max(1, (self._bytes_max - self.in_flight_bytes) // each))
            pages = self._not_loading(space, shard, packed, pages)
            if not self._admits(fetch, pages * each):
                self._want(fetch, space, shard, packed)
                return None
            found = space.exact(node, offset, pages)
        self._want(fetch, space, shard, packed[pages * KEY_BYTES :])
        return pages, found, shard

    @property
    def _bytes_max(self) -> int:
        """Maximum bytes in flight; a page that is larger is loaded alone."""
        memory_bytes = self._memory.slots.capacity_bytes
        return min(BYTES_SHARE * self._rules.in_flight_bytes_max, memory_bytes // 2)

    def _fits(self, size_bytes: int) -> bool:
        in_flight = self.in_flight_bytes
        return not in_flight or in_flight + size_bytes <= self._bytes_max

    def _admits(self, fetch: Fetch, size_bytes: int) -> bool:
        """Whether a fetch may begin a load of this size now; else the first one is remembered."""
        first, fits = self.first or fetch, self._fits(size_bytes)
        if first is not fetch:
            return fits and first is not self._refused[0]
        self._refused = (None, 0) if fits else (fetch, size_bytes)
        return fits

    def _not_loading(self, space: PrefixTree, shard: int, packed: bytes, pages: int) -> int:
        """How many leading pages, at least the first one, are in no load yet."""
        for at in range(1, pages):
            key = PrefixKey(packed[at * KEY_BYTES : (at + 1) * KEY_BYTES])
            if (space.number, shard, key) in self._by_page:
                return at
        return pages

    def begin(
        self, fetch: Fetch, node: PrefixNode, shard: int, keys: bytes, slots: Sequence[Slot]
    ) -> None:
        """Load pages to slots: only the first ones, if there are not enough slots for all.

        Without any slot, or if making room dropped the pages, the fetch gets no more.

        Args:
            fetch: the fetch.
            node: the node of the pages before room was made.
            shard: the shard.
            keys: the node's keys at that time.
            slots: WRITING; those that are not needed become FREE.
        """
        if slots and is_live(node) and node.keys != keys:
            self._want(fetch, node.space, shard, keys)  # it was split: they are looked for again
            self._memory.slots.abort(slots)
        elif not slots or not is_live(node) or not node.on_disk >> shard & 1:
            self._memory.slots.abort(slots)
            fetch.wanted.clear()
        elif len(slots) < node.count:
            head = node.split(len(slots))
            self._want(fetch, node.space, shard, node.keys)
            self._begin(head, shard, slots, fetch)
        else:
            self._begin(node, shard, slots, fetch)

    def _begin(self, node: PrefixNode, shard: int, slots: Sequence[Slot], fetch: Fetch) -> None:
        assert len(slots) == node.count, node
        assert not fetch.ended, node
        assert not node.memory >> shard & 1, node
        space, keys, parent = node.space, node.key_list(), node.key_before(0)
        digests, places = node.digest_columns[shard], unpack_places(node.place_columns[shard])
        assert parent is not None, node
        its, of, now_ns = space.shards[shard], RecordOf(space, shard), self._memory.moment.now_ns
        load = PageLoad(space, shard, node.keys, digests, list(slots), now_ns, fetch)
        fetch.outstanding += 1
        self.in_flight_bytes += load.size_bytes
        for at, key in enumerate(keys):
            assert (space.number, shard, key) not in self._by_page, node
            self._by_page[space.number, shard, key] = load
            self._log.pin_segment(places[at].segment)
            digest = digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
            page = PageRecord(key, parent, space.identity, its.spec, its.page_bytes, digest)
            job = DiskRead(self._queue.number(), places[at], page, slots[at])
            self._by_job[job.job] = load, at
            self._queue.submit(job, of)
            parent = key

    def tell(self, fetch: Fetch) -> None:
        """All loads that can start now were started: resume a fetch that waits for none."""
        self._memory.fetches.tell(fetch)

    def loaded(self, job: DiskRead, error: KVStoreError | None, tokens: bytes) -> None:
        """A record was read, or cannot be; it had these ``tokens``. The last one ends its load."""
        load, number = self._by_job.pop(job.job)
        self._log.unpin_segment(job.place.segment)
        load.left -= 1
        assert load.left >= 0
        load.tokens[number] = tokens
        if error is not None:
            load.errors[number] = error
        if not load.left:
            for at in range(0, len(load.keys), KEY_BYTES):
                key = PrefixKey(load.keys[at : at + KEY_BYTES])
                del self._by_page[load.space.number, load.shard, key]
            self.in_flight_bytes -= load.size_bytes
            assert (self.in_flight_bytes > 0) == bool(self._by_page), "a load would wait for none"
            self._queue.effects.append(load)

    def _want(self, fetch: Fetch, space: PrefixTree, shard: int, packed: bytes) -> None:
        """Add the pages that a fetch wants next."""
        if packed:
            fetch.wanted.appendleft((space, shard, packed))
