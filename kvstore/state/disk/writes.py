"""Writes of pages from memory to the SSD log, and the puts that wait for them. Pure.

The pages of a write are one run, or single pages that follow each other, when it starts; meanwhile
they may be split, dropped, and stored again. A write counts when all its records are in the file
and the page before them is on disk: until then it waits for the write of that page, and its own
followers wait for it. If a record failed, only the pages before that record count.
"""

import sys
from collections.abc import Iterator, Sequence

from kvstore.protocol.errors import CapacityError, KVStoreError
from kvstore.protocol.page import DIGEST_BYTES, KEY_BYTES, PrefixKey
from kvstore.state.choice.admission import Admission, ask_later
from kvstore.state.disk.graves import Graves
from kvstore.state.disk.jobs import (
    DiskWrite,
    Durable,
    PageMemory,
    PageRecord,
    RecordOf,
    UnpinSlots,
    Write,
)
from kvstore.state.disk.limits import SHORT_PAGES, DiskLimits
from kvstore.state.disk.log import SegmentLog
from kvstore.state.disk.queue import DiskQueue
from kvstore.state.disk.syncs import Syncs
from kvstore.state.tree.actions import TierStored
from kvstore.state.tree.columns import pack_places, pack_slots
from kvstore.state.tree.node import RUN_PAGES_MAX, PrefixNode
from kvstore.state.tree.places import Place
from kvstore.state.tree.prefix_tree import PrefixTree


class Writes:
    """The writes of one node.

    Args:
        memory: the memory side.
        log: the places of records.
        admission: which ordinary pages are worth writing.
        limits: the limits of spaces on disk.
        graves: tombstones that must be written before their pages are.
        syncs: syncs written records, and notifies durable puts.
        queue: gets jobs for the tier; :meth:`wrote` gets their ends.

    Attributes:
        in_flight_bytes: being written.
        durable_bytes: those of them that are written for durable puts.
    """

    def __init__(
        self, memory: PageMemory, log: SegmentLog, admission: Admission, limits: DiskLimits,
        graves: Graves, syncs: Syncs, queue: DiskQueue,
    ) -> None:  # fmt: skip
        self.in_flight_bytes = self.durable_bytes = 0
        self._memory = memory
        self._log = log
        self._admission = admission
        self._limits = limits
        self._graves = graves
        self._syncs = syncs
        self._queue = queue
        self._under_way = limits.writing

    def __len__(self) -> int:
        return len(self._under_way)

    def holds(self, node: PrefixNode, shard: int) -> bool:
        """Whether the pages of a node are being written."""
        return bool(node.to_disk >> shard & 1)

    def is_dirty(self, node: PrefixNode, shard: int) -> bool:
        """Whether the pages are only in memory, and may be written to disk."""
        return (
            bool(node.memory & node.ready & ~(node.on_disk | node.to_disk) & 1 << shard)
            and not node.memory_only >> shard & 1
            and node.space.shards[shard].record_bytes <= self._log.record_bytes_max
            and not self._graves.holds(node, shard)
        )

    def begin(
        self, node: PrefixNode, shard: int, now_ns: int, durable: Durable | None = None,
        most: int = sys.maxsize,
    ) -> bool:  # fmt: skip
        """Start to write a node's pages and the pages before it; returns whether all were started.

        For a durable put, which is notified, or for ordinary pages, as far as admitted, and the
        first ``most`` of them and the rest of a run; of a space that is at its quota exactly
        ``most``. If only some pages are being written, the node is split, and keeps the others;
        otherwise it keeps the last of them.
        """
        space, window = node.space, node.space.shards[shard].window_pages
        chain: list[PrefixNode] = []
        at: PrefixNode | None = node
        while at is not None and at is not space.root and not at.on_disk >> shard & 1:
            under_way = self._under_way.of(at, shard)
            if under_way is not None:
                self._await(under_way, durable)
                break
            if not self.is_dirty(at, shard):
                ask_later(chain[::-1])
                return False  # its engine is still writing it, or it must not go to disk
            chain.append(at)
            at = None if window else at.above
        if at is not None and space.departs(at) >> shard & 1:
            return False  # it would leave with the page before it
        chain.reverse()
        wanted = admitted = sum([one.count for one in chain])
        size = space.shards[shard].record_bytes
        if durable is None:
            pairs = [(one, shard) for one in chain]
            admitted = self._admission.admit(pairs, size, now_ns, self._memory.moment.tick)
            self._memory.counts["not_admitted_pages"] += admitted < wanted
        assert 0 <= admitted <= wanted, node
        if self._limits.is_short(space, min(admitted, most + RUN_PAGES_MAX) * size):
            first = min(admitted, most)
        else:
            first = _to_the_end_of_a_run(chain, admitted, most)
        begun = self._begin_chain(_leading(chain, first), shard, first, durable)
        if durable is None and begun < admitted:
            self._admission.take_back(admitted - begun, size)
        return begun == wanted

    def at_once(self, space: PrefixTree, shard: int, most: int) -> int:
        """How many of up to ``most`` pages of a space may begin to be written at once."""
        short = self._limits.is_short(space, most * space.shards[shard].record_bytes)
        return min(most, SHORT_PAGES) if short else most

    def unwritten(self, node: PrefixNode, shard: int) -> Iterator[PrefixNode]:
        """A node, and those before it, up to one that is on disk or is being written.

        In a KV group with a window the node is written alone.
        """
        if node.space.shards[shard].window_pages:
            yield node
            return
        at: PrefixNode | None = node
        while at is not None and at is not node.space.root:
            if (at.on_disk | at.to_disk) >> shard & 1:
                return
            yield at
            at = at.above

    def begin_all(self, nodes: Sequence[PrefixNode], now_ns: int) -> None:
        """Start to write the leading ones of single pages that follow each other, all that may be.

        They are written regardless of admission, together, and as far as there is room.
        """
        missing: dict[int, list[PrefixNode]] = {}
        for node in nodes:
            shards = self._unwritten(node)
            if not all(self.is_dirty(node, shard) for shard in shards):
                break
            for shard in shards:
                missing.setdefault(shard, []).append(node)
        for shard, those in missing.items():
            alone = those[0].space.shards[shard].window_pages
            for node in those if alone else those[-1:]:  # together with those before it
                self.begin(node, shard, now_ns, Durable())

    def begun(self, nodes: Sequence[PrefixNode]) -> int:
        """How many leading pages are on disk or are being written, as far as they are READY."""
        for count, node in enumerate(nodes):
            if self._unwritten(node):
                return count
        return len(nodes)

    def wrote(self, job: DiskWrite, error: KVStoreError | None) -> list[tuple[PrefixNode, int]]:
        """A record was written, or failed; the last one of a write settles the write.

        It counts once the preceding page is on disk; then its followers do too.

        Returns:
            the nodes of pages, of this write and its followers, that were not written.
        """
        write = self._under_way.of_slot(job.slot)
        write.left -= 1
        assert write.left >= 0
        self.in_flight_bytes -= write.each
        self.durable_bytes -= write.each * write.hurried
        assert self.durable_bytes >= 0
        assert self.in_flight_bytes >= self.durable_bytes
        if error is not None:
            write.errors[(job.place.offset - write.place.offset) // write.each] = error
        settling = [write] if not write.left else []
        unwritten: list[tuple[PrefixNode, int]] = []
        while settling:
            write = settling.pop()
            head = self._head_of(write)
            if head is not None:
                head.followers.append(write)  # it may have begun later: it had left the disk
                continue
            self._settle(write, unwritten)
            settling += write.followers
        return unwritten

    def give_up(self, durable: Durable) -> None:
        """Stop notifying a durable put."""
        for write in self._under_way if durable.outstanding else ():
            if durable in write.waiters:
                write.waiters.remove(durable)

    def _unwritten(self, node: PrefixNode) -> list[int]:
        """Shards of which the node's READY page is not on disk, and is not being written."""
        missing = node.ready & ~node.on_disk
        if not missing:
            return []
        return [
            shard for shard in node.digests if missing >> shard & 1 and not self.holds(node, shard)
        ]

    def _begin_chain(
        self, chain: list[PrefixNode], shard: int, pages: int, durable: Durable | None
    ) -> int:
        """Start to write ``pages`` pages of nodes, as far as there is room; returns how many."""
        begun = 0
        for some in _together(chain):
            space, wanted = some[0].space, sum([one.count for one in some])
            # Of a space whose quota leaves no room for all of them each page is asked for.
            alone = self._limits.is_short(space, wanted * space.shards[shard].record_bytes)
            for nodes in [[page] for one in some for page in one.singles()] if alone else [some]:
                if alone and not self._limits.make_room(nodes[0], shard):
                    self._memory.counts["disk_refused_quota"] += pages - begun
                    return begun
                wanted = sum([node.count for node in nodes])
                written = self._begin_nodes(nodes, shard, durable)
                begun += written
                assert begun <= pages, nodes[0]
                if written < wanted:
                    self._memory.counts["disk_full_pages"] += pages - begun
                    return begun
        return begun

    def _begin_nodes(self, nodes: list[PrefixNode], shard: int, durable: Durable | None) -> int:
        """Start to write a run, or single pages, in one or more writes; returns how many pages."""
        begun, left = 0, nodes
        while True:
            keys = b"".join([node.keys for node in left])
            placed = self._log.place(left[0].space, shard, keys, self._memory.moment.tick)
            if placed is None:
                return begun
            begun += placed.pages
            some = _leading(left, placed.pages)
            self._begin_write(some, shard, placed.place, durable)
            if placed.pages * KEY_BYTES == len(keys):
                return begun
            left = left[len(some) :] or left  # of a run that was split the node keeps the rest

    def _begin_write(
        self, nodes: list[PrefixNode], shard: int, place: Place, durable: Durable | None
    ) -> None:
        space, slots, keys = nodes[0].space, nodes[0].slots_of(shard), nodes[0].keys
        if len(nodes) > 1:
            slots = [slot for node in nodes for slot in node.slots_of(shard)]
            keys = b"".join([node.keys for node in nodes])
        its = space.shards[shard]
        write = Write(space, shard, keys, slots, place, its.record_bytes)
        self._under_way.add(write)
        self._memory.slots.pin(slots, 0)
        write.hurried = durable is not None and len(durable.pages) > 0
        self.in_flight_bytes += write.size
        self.durable_bytes += write.size * write.hurried
        space.disk_bytes += write.size
        identity, spec, page_bytes = space.identity, its.spec, its.page_bytes
        jobs: list[DiskWrite] = []
        places = write.places()
        for node in nodes:
            parent, digests, tokens = node.key_before(0), node.digest_columns[shard], node.tokens
            assert parent is not None, node
            token_bytes = len(tokens) // node.count
            for at, key in enumerate(node.key_list()):
                digest = digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
                token_ids = tokens[at * token_bytes : (at + 1) * token_bytes] if tokens else b""
                page = PageRecord(key, parent, identity, spec, page_bytes, digest, token_ids)
                number = len(jobs)
                jobs.append(DiskWrite(self._queue.number(), places[number], page, slots[number]))
                parent = key
            node.write_begun(shard)
            self._memory.story.tell("DiskWrite begun", node, shard, node.count)
        self._queue.submit_writes(jobs, RecordOf(space, shard))
        self._await(write, durable)

    def _await(self, write: Write, durable: Durable | None) -> None:
        if durable is not None and durable not in write.waiters:
            assert not durable.ended
            write.waiters.append(durable)
            durable.outstanding += 1

    def _head_of(self, write: Write) -> Write | None:
        """The write of the preceding page, which must finish first."""
        node = self._page(write, 0)
        head = node.above if node is not None else None
        if head is None or write.space.shards[write.shard].window_pages:
            return None
        return self._under_way.of(head, write.shard)

    def _page(self, write: Write, number: int) -> PrefixNode | None:
        """The node that starts with a page of a write; None if the page was dropped meanwhile.

        If it was stored again, it has another slot.
        """
        at = number * KEY_BYTES
        node = write.space.index.get(PrefixKey(write.keys[at : at + KEY_BYTES]))
        if node is None or not node.memory >> write.shard & 1:
            return None
        mine = node.slot_columns[write.shard].startswith(pack_slots([write.slots[number]]))
        return node if mine else None

    def _settle(self, write: Write, unwritten: list[tuple[PrefixNode, int]]) -> None:
        """Its pages are on disk, if their records are written and the preceding page is on disk."""
        self._under_way.remove(write)
        shard, at, pages = write.shard, 0, len(write.slots)
        left = CapacityError("the page left the store meanwhile")
        error: KVStoreError | None = next(iter(write.errors.values()), None)
        while at < pages:
            node = self._page(write, at)
            if node is None:
                self._abandon(write, at, 1)
                error = error or left
                at += 1
                continue
            alike = write.alike(at, node.count)
            if alike < node.count:
                node = node.split(alike)
            self._memory.story.tell("DiskWrite ended", node, shard, node.count)
            if at not in write.errors and self._is_reachable(node, shard):
                self._syncs.wrote()
                node.demote(shard, pack_places(write.place_of(at), write.each, node.count))
                self._log.wrote(write.place, node.count)
                self._memory.counts["demoted_pages"] += node.count
                above, keys = node.above, node.key_list()
                assert above is not None
                self._queue.effects.append(
                    TierStored(node.space, shard, keys, above.key, "ssd", node.tokens)
                )
                self._memory.story.tell("TierStored ssd", node, shard, node.count)
            else:
                node.write_ended(shard)
                self._abandon(write, at, node.count)
                if node.above is not None:
                    self._limits.add_candidate(node.above)
                error = error or left
                unwritten.append((node, shard))
            at += node.count
        self._queue.effects.append(UnpinSlots(write.slots))
        for durable in write.waiters:
            self._syncs.part_ended(durable, error)

    def _abandon(self, write: Write, first: int, pages: int) -> None:
        """Give up ``pages`` records of a write: they failed, or their pages were dropped."""
        for number in range(first, first + pages):
            self._log.abandon(write.place_of(number))
        write.space.disk_bytes -= pages * write.each
        assert write.space.disk_bytes >= 0
        self._memory.counts["unwritten_pages"] += pages

    def _is_reachable(self, node: PrefixNode, shard: int) -> bool:
        """Whether the pages that a page needs before it are on disk."""
        head, space = node.above, node.space
        if space.shards[shard].window_pages or head is space.root:
            return True
        return head is not None and bool(head.on_disk >> shard & 1)


def _together(chain: list[PrefixNode]) -> list[list[PrefixNode]]:
    """The nodes of a chain that are written together: a run, or single pages one after another."""
    found: list[list[PrefixNode]] = []
    for node in chain:
        last = found[-1] if node.count == 1 and found else None
        if last is not None and last[-1].count == 1 and len(last) < RUN_PAGES_MAX:
            last.append(node)
        else:
            found.append([node])
    return found


def _to_the_end_of_a_run(chain: list[PrefixNode], pages: int, most: int) -> int:
    """How many of the first ``pages`` pages: ``most``, and the others of the last one's run."""
    found = 0
    for one in chain:
        if found >= min(pages, most):
            break
        found += one.count
    return min(found, pages)


def _leading(chain: list[PrefixNode], pages: int) -> list[PrefixNode]:
    """The nodes of the first ``pages`` pages of a chain; the last one is split if needed."""
    found: list[PrefixNode] = []
    for one in chain:
        if pages <= 0:
            break
        found.append(one.split(pages) if pages < one.count else one)
        pages -= found[-1].count
    return found
