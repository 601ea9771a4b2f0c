"""Durable puts: their pages are written with all pages before them, in steps, and synced. Pure.

::

    beginning ──all writes have begun──► writing ──all have ended──► syncing ──► ended
        └── an error ─────────────────────► writing ──all have ended───────────────► ended

- **beginning**: it is in a queue. A step begins some of its writes, from the start of the chain on,
  within the limits; then it is the next one's turn. What it waits for is either a further step of
  this node, see :meth:`Persists.may_go_on`, or the end of a job of the tier.
- **writing**: no further write begins; it waits for those that have begun. From then on its pages
  may leave memory: they are on disk, or a write pins them. A sync that hangs keeps none of them.
- **syncing**: without an error it waits for a sync that begins now or later; for another one if
  its pages are in other places afterwards, which that sync need not have covered.
- **ended**: it is acknowledged, without an error only if its pages are on disk now.

Errors: a write failed, here or (while the put is beginning) anywhere; a page has left the store; a
page cannot be written and no job under way can change that; the deadline has come. The first error
stays, whatever happens later.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvstore.protocol.errors import CapacityError, DurabilityUnavailable, TransferTimeout
from kvstore.protocol.page import KEY_BYTES, PrefixKey
from kvstore.state.disk.durability import unwritten
from kvstore.state.disk.jobs import DURABLES_MAX, DiskRules, Durable, PageMemory, UnpinSlots
from kvstore.state.disk.log import SegmentLog
from kvstore.state.disk.queue import DiskQueue
from kvstore.state.disk.syncs import Syncs
from kvstore.state.disk.writes import Writes
from kvstore.state.tree.node import PrefixNode

PAGES_STEP = 128
"""Pages of durable puts that one step begins to write; a turn has two steps or fewer."""
PUTS_STEP: Final = 8
"""Durable puts that one step looks at."""
UNPINNED_TICK: Final = 512
"""Pages after which one tick unpins no further put whose deadline has come."""
_UNPINNED: Final = 4
"""Pages of a put that are unpinned in the time that one takes to be written."""
_CHECKED_PAGES: Final = 1024
_LATE: Final = "not all pages were written"
_FULL: Final = "the disk, or the space's quota of it, is full now; try later"


class Persists:
    """The durable puts of one node.

    Their writes use at most half of the bytes in flight, so that ordinary writes go on, too; and
    they begin before those, so that these do not keep them from going on.

    Args:
        memory: the memory side.
        log: the places of records.
        rules: the limit of bytes in flight.
        writes: the writes of pages.
        syncs: syncs written records, and tells which puts have ended.
        queue: gets the slots that are no longer needed.
        write: starts to write a node's pages and those before it: node, shard, put, maximum pages;
            how many writes have begun.
        is_busy: whether a job of the tier may make room, or let a page be written, when it ends.

    Attributes:
        acknowledged: durable puts and removals that have ended.
    """

    def __init__(
        self, memory: PageMemory, log: SegmentLog, rules: DiskRules, writes: Writes, syncs: Syncs,
        queue: DiskQueue, write: Callable[[PrefixNode, int, Durable | None, int], int],
        is_busy: Callable[[], bool],
    ) -> None:  # fmt: skip
        self.acknowledged: list[Durable] = []
        self._memory = memory
        self._log = log
        self._rules = rules
        self._writes = writes
        self._syncs = syncs
        self._queue = queue
        self._write = write
        self._is_busy = is_busy
        #: All that have not ended; and those that are beginning, whose turn is next first.
        self._all: set[Durable] = set()
        self._beginning: deque[Durable] = deque()
        #: How many of the last ones that were looked at could not go on, since a job ended.
        self._in_vain = 0
        self._pages_left = PAGES_STEP

    def __len__(self) -> int:
        """How many are beginning."""
        return len(self._beginning)

    def begin(
        self, nodes: Sequence[PrefixNode], shard: int, deadline_ns: int, *, degraded: bool
    ) -> Durable:
        """See :meth:`kvstore.state.disk.pages.DiskPages.make_durable`."""
        if len(self._all) >= DURABLES_MAX:
            raise CapacityError("too many durable pages wait for the SSD tier now; try later")
        rest = unwritten(nodes, shard)
        if [at for at in rest if at.memory_only >> shard & 1]:
            raise DurabilityUnavailable(
                "a page of these was stored with no_store, ttl_s or read_once and never goes to"
                " disk: evict it and put it again"
            )
        new = [at for at in nodes if not _is_begun(at, shard)]
        departs = any(at.space.departs(at) >> shard & 1 for at in nodes[-1:])
        if departs or (new and (degraded or not self._log.has_room(new[0].space, shard))):
            raise CapacityError(_FULL)  # in vain, and said before anything is touched
        records = [(node.space, shard, node.keys, node.digest_columns[shard]) for node in nodes]
        durable = Durable(records, deadline_ns, removals=self._log.removals)
        durable.rest = [node.keys for node in reversed(rest)]
        durable.outstanding = 1  # that it is beginning
        self._all.add(durable)
        for node in nodes:
            if rest and node.memory >> shard & 1:
                slots = node.slots_of(shard)
                self._memory.slots.pin(slots, 0)
                durable.pinned += slots
        pages = len(durable.rest)
        if self._goes_on(durable):
            self._in_vain = 0
        elif len(durable.rest) < pages and self._is_busy():
            self._in_vain += 1
        else:
            durable.rest.clear()
            durable.outstanding -= 1
            self._unpin(durable)
            self._end(durable)
            self.acknowledged.remove(durable)
            raise CapacityError(_FULL)
        self._sort(durable)
        assert durable in self._all
        return durable

    def go_on(self, *, degraded: bool) -> None:
        """Begin further writes, as many as one step may."""
        self._pages_left = PAGES_STEP
        for _ in range(min(PUTS_STEP, len(self._beginning))):
            if self._pages_left <= 0 or not self.may_go_on(degraded=degraded):
                return
            durable = self._beginning.popleft()
            assert durable.rest
            assert not durable.ended
            if degraded:
                durable.error = durable.error or CapacityError(_FULL)
            elif 0 < durable.deadline_ns <= self._memory.moment.now_ns:
                durable.error = durable.error or TransferTimeout(_LATE)
            elif self._goes_on(durable):
                self._in_vain = 0
            else:
                self._in_vain += 1
                if not self._is_busy():
                    durable.error = CapacityError(_FULL)
            self._sort(durable)

    def may_go_on(self, *, degraded: bool) -> bool:
        """Whether a further step would do something, and need not wait for a job of the tier."""
        if not self._beginning or degraded:
            return bool(self._beginning)
        return self._in_vain < len(self._beginning) and self._room_bytes > 0

    def job_ended(self) -> None:
        """A job of the tier has ended, or time has passed: each one may go on now."""
        self._in_vain = 0

    def advance(self) -> None:
        """Time has passed: end the beginning of some whose deadline has come.

        They do not wait for a step: there is none while writes hang, and they pin their pages.
        """
        self.job_ended()
        now_ns = self._memory.moment.now_ns
        over = [one for one in self._beginning if 0 < one.deadline_ns <= now_ns]
        unpinned = 0
        for durable in over[:PUTS_STEP]:
            if unpinned >= UNPINNED_TICK:
                return
            unpinned += len(durable.pinned)
            self._beginning.remove(durable)
            durable.error = durable.error or TransferTimeout(_LATE)
            self._sort(durable)
            assert not durable.pinned, "it would keep memory as long as the writes hang"

    def end_some(self) -> None:
        """Acknowledge some of those that are synced or failed."""
        for durable in self._syncs.take_some():
            if self._syncs.covers(durable):
                self._end(durable)

    def checks(self) -> Iterator[int]:
        """Assert the state of each one that has not ended, one after another.

        Yields:
            0, after each one.
        """
        beginning = set(self._beginning)
        assert len(beginning) == len(self._beginning), "it would go on twice"
        assert beginning <= self._all
        assert self._in_vain >= 0
        for durable in list(self._all):
            if durable not in self._all:
                continue  # it has ended meanwhile
            assert not durable.ended
            assert bool(durable.rest) == (durable in self._beginning)
            assert not durable.rest or durable.outstanding > 0, "it ends before its last write"
            assert durable.rest or not durable.pinned, "nothing that hangs may keep them in memory"
            assert all(self._memory.slots.pinned(slot) for slot in durable.pinned[:_CHECKED_PAGES])
            yield 0

    @property
    def _room_bytes(self) -> int:
        """How many more bytes of durable puts may be written at a time."""
        most, writes = self._rules.in_flight_bytes_max, self._writes
        return min(most - writes.in_flight_bytes, most // 2 - writes.durable_bytes)

    def _sort(self, durable: Durable) -> None:
        """One has gone on: it is beginning still, or all its writes have begun that ever will."""
        if durable.rest and durable.error is None:
            self._beginning.append(durable)
            return
        durable.rest.clear()
        self._unpin(durable)
        assert durable.outstanding > 0, "it would be acknowledged before its writes have ended"
        self._syncs.part_ended(durable, None)

    def _unpin(self, durable: Durable) -> None:
        """No further write of it begins: the pages are on disk, or are being written, or failed."""
        self._pages_left -= len(durable.pinned) // _UNPINNED
        self._queue.effects.append(UnpinSlots(durable.pinned))
        durable.pinned = []

    def _goes_on(self, durable: Durable) -> bool:
        """Begin writes, as many as one step may; False = the next page cannot be written now."""
        while durable.rest and self._room_bytes > 0 < self._pages_left:
            space, shard, _, _ = durable.pages[0]
            each = space.shards[shard].record_bytes
            wanted = min(self._pages_left, max(1, self._room_bytes // each))
            most = self._writes.at_once(space, shard, wanted)
            found = self._leading(durable, most)
            if durable.error is not None:
                break
            assert found
            last, begun = found[-1][0], 0
            if _is_begun(last, shard) or self._log.has_room(space, shard):
                begun = self._write(last, shard, durable, most)  # with those before it
            assert begun >= 0
            self._pages_left -= max(1, begun) if most == wanted else PAGES_STEP
            if not (begun or _is_begun(last, shard)):
                return False
            for node, pages in found:
                if not _is_begun(node, shard):
                    break
                keys = durable.rest.pop()
                if pages * KEY_BYTES < len(keys):
                    durable.rest.append(keys[pages * KEY_BYTES :])
        return True

    def _leading(self, durable: Durable, most: int) -> list[tuple[PrefixNode, int]]:
        """The nodes that are to be written next, and how many leading pages of the rest each has.

        Or one node that is on disk, or being written. Without one the put has got an error.
        """
        space, shard, _, _ = durable.pages[0]
        found: list[tuple[PrefixNode, int]] = []
        for keys in reversed(durable.rest):
            key = PrefixKey(keys[:KEY_BYTES])
            node = space.index.get(key)
            if node is None or not node.present >> shard & 1:
                durable.error = CapacityError("a page left the store before it was written")
                break
            position = node.position(key)
            pages = node.matching(position, keys, 0)
            assert pages > 0, node
            if _is_begun(node, shard):
                if not found:
                    found.append((node, pages))
                break
            pages = min(pages, most)
            found.append((space.exact(node, position, pages), pages))
            most -= pages
            assert most >= 0, node
            if not most or pages * KEY_BYTES < len(keys) or space.shards[shard].window_pages:
                break
        return found

    def _end(self, durable: Durable) -> None:
        assert not durable.ended, "it would be acknowledged twice"
        assert not durable.rest, "it would be acknowledged before its last page is written"
        assert not durable.pinned, "nobody would unpin its pages"
        self._writes.give_up(durable)
        self._all.discard(durable)
        durable.pages.clear()
        durable.ended = True
        self.acknowledged.append(durable)


def _is_begun(node: PrefixNode, shard: int) -> bool:
    """Whether pages are on disk, or being written."""
    return (node.on_disk | node.to_disk) >> shard & 1 > 0
