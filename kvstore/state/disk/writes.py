"""Pages on their way from memory to the SSD log, and who waits for them. Pure.

A write counts when its bytes are in the file and the page's head is on disk: until then it waits
for the write of its head, and what follows waits for it.
"""

from collections.abc import Callable

from kvstore.errors import CapacityError, KVStoreError
from kvstore.state.choice.admission import Admission, ask_later
from kvstore.state.disk.graves import Graves
from kvstore.state.disk.jobs import DiskJob, DiskWrite, Durable, PageMemory, Write, page_name
from kvstore.state.disk.limits import DiskLimits
from kvstore.state.disk.log import SegmentLog
from kvstore.state.disk.syncs import Syncs
from kvstore.state.tree.actions import TierStored
from kvstore.state.tree.node import PrefixNode, is_live
from kvstore.state.tree.places import Place, record_bytes


class Writes:
    """The writes of one node.

    Args:
        memory: the memory side.
        log: which record lies where.
        admission: which ordinary pages are worth writing.
        limits: what spaces may have on disk.
        graves: tombstones that must be written before their pages are.
        syncs: told what is written, and who waits for it to be synced.
        number: numbers a job.
        submit: hands a job to the tier; :meth:`wrote` is told of its end.

    Attributes:
        in_flight_bytes: being written.
    """

    def __init__(
        self, memory: PageMemory, log: SegmentLog, admission: Admission, limits: DiskLimits,
        graves: Graves, syncs: Syncs, number: Callable[[], int], submit: Callable[[DiskJob], None],
    ) -> None:  # fmt: skip
        self.in_flight_bytes = 0
        self._memory = memory
        self._log = log
        self._admission = admission
        self._limits = limits
        self._graves = graves
        self._syncs = syncs
        self._number = number
        self._submit = submit
        self._writes = limits.writing

    def __len__(self) -> int:
        return len(self._writes)

    def __contains__(self, page: tuple[PrefixNode, int]) -> bool:
        return page in self._writes

    def is_dirty(self, node: PrefixNode, shard: int) -> bool:
        """Whether the page is in memory only, and may be on disk."""
        return (
            bool(node.memory & node.ready & ~node.on_disk & 1 << shard)
            and not node.memory_only >> shard & 1
            and node.space.shards[shard].record_bytes <= self._log.record_bytes_max
            and (node, shard) not in self._writes
            and not self._graves.holds(node, shard)
        )

    def begin(
        self, node: PrefixNode, shard: int, now_ns: int, durable: Durable | None = None
    ) -> bool:
        """Start to write a page and what precedes it; whether all of it is on its way.

        For a durable put that is told in the end, or for an ordinary page, if it is admitted.
        """
        window = node.space.shards[shard].window_pages
        chain: list[PrefixNode] = []
        at: PrefixNode | None = node
        while at is not None and at is not node.space.root and not at.on_disk >> shard & 1:
            under_way = self._writes.get((at, shard))
            if under_way is not None:
                self._await(under_way, durable)
                break
            if not self.is_dirty(at, shard):
                ask_later(chain[::-1])
                return False  # its engine is still writing it, or it must not go to disk
            chain.append(at)
            at = None if window else at.parent
        chain.reverse()
        wanted, begun = len(chain), 0
        size = record_bytes(node.space.shards[shard].page_bytes)
        if durable is None:
            pairs = [(one, shard) for one in chain]
            admitted = self._admission.admit(pairs, size, now_ns, self._memory.tick)
            del chain[admitted:]
            self._memory.counts["not_admitted_pages"] += admitted < wanted
        for one in chain:
            if not self._limits.make_room(one, shard):
                self._memory.counts["disk_refused_quota"] += len(chain) - begun
                break
            place = self._log.place(one, shard, self._memory.tick)
            if place is None:
                self._memory.counts["disk_full_pages"] += len(chain) - begun
                break
            begun += 1
            self._begin_write(one, shard, place, durable)
        if durable is None and begun < len(chain):
            self._admission.take_back(len(chain) - begun, size)
        return begun == wanted

    def wrote(
        self, node: PrefixNode, shard: int, error: KVStoreError | None
    ) -> list[tuple[PrefixNode, int]]:
        """Count the page as written once its head is, then those that waited for it.

        Returns:
            the pages, of this one and those, that did not come to disk.
        """
        write = self._writes[node, shard]
        write.error = error
        self.in_flight_bytes -= write.size
        assert self.in_flight_bytes >= 0
        settling, unwritten = [write], list[tuple[PrefixNode, int]]()
        while settling:
            write = settling.pop()
            head = self._head_of(*write.job.page[:2])
            if head is not None:
                head.followers.append(write)  # it may have begun later: it had left the disk
                continue
            self._settle(write)
            if write.error is not None:
                unwritten.append(write.job.page[:2])
            settling += write.followers
        return unwritten

    def give_up(self, durable: Durable) -> None:
        """A durable put is not told any more."""
        for write in self._writes.values() if durable.outstanding else ():
            if durable in write.waiters:
                write.waiters.remove(durable)

    def _begin_write(
        self, node: PrefixNode, shard: int, place: Place, durable: Durable | None
    ) -> None:
        assert (node, shard) not in self._writes
        assert not node.on_disk >> shard & 1
        slot = node.slot(shard)
        job = DiskWrite(self._number(), place, page_name(node, shard), slot)
        size = record_bytes(node.space.shards[shard].page_bytes)
        write = self._writes[node, shard] = Write(job, size)
        self._memory.slots.pin([slot], 0)
        self.in_flight_bytes += size
        node.space.disk_bytes += size
        self._submit(job)
        self._await(write, durable)

    def _await(self, write: Write, durable: Durable | None) -> None:
        if durable is not None and durable not in write.waiters:
            write.waiters.append(durable)
            durable.outstanding += 1

    def _head_of(self, node: PrefixNode, shard: int) -> Write | None:
        """The write that one of this page counts only after."""
        head, window = node.above, node.space.shards[shard].window_pages
        return None if window or head is None else self._writes.get((head, shard))

    def _settle(self, write: Write) -> None:
        """The page is on disk, if its bytes are and its head is."""
        node, shard = write.job.page[:2]
        del self._writes[node, shard]
        window, head = node.space.shards[shard].window_pages, node.above
        on_disk = head is not None and head.on_disk >> shard & 1
        reachable = window or head is node.space.root or on_disk
        mine = is_live(node) and node.memory >> shard & 1 and node.slot(shard) == write.job.slot
        if write.error is None and mine and reachable:
            node.demote(shard, write.job.place)
            self._log.wrote(write.job.place)
            self._memory.counts["demoted_pages"] += 1
            self._memory.emit(TierStored, node, shard, "ssd")
        else:
            self._log.abandon(write.job.place, node, shard)
            node.space.disk_bytes -= write.size
            assert node.space.disk_bytes >= 0
            if node.above is not None:
                self._limits.add_candidate(node.above)
            self._memory.counts["unwritten_pages"] += 1
            write.error = write.error or CapacityError("the page left the store meanwhile")
        self._memory.slots.unpin([write.job.slot])
        self._memory.add_candidate(node)
        self._answer(write)

    def _answer(self, write: Write) -> None:
        if write.error is None:
            self._syncs.wrote()
        for durable in write.waiters:
            self._syncs.part_ended(durable, write.error)
