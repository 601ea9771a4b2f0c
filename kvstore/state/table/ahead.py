"""Slots reserved in advance: the next page of a client takes one round trip. Pure.

A put of a page takes two requests: one reserves a slot, one reports that the bytes are there. A
client that puts single pages gets its next slot with the second answer. It writes its next page
there, and names the page and reports its bytes in a single request.

A reserved slot is an open put without a page: its bytes belong to its client until that stores a
page in it, gives it back, or is known not to access it any more.
"""

from collections import Counter
from typing import NamedTuple

from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.page import PrefixKey
from kvstore.state.table.residents import Residents
from kvstore.state.table.room import Room
from kvstore.state.table.runs import begin_pages, known_pages, new_pages
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.sessions import Process, Put

AHEAD_MAX = 4
"""Maximum reserved slots of one connection, each for a different space or shard."""
AHEAD_SHARE = 32
"""All reserved slots take at most this part of memory, and each at most this part of its session's
quota, so that an idle client's slots cost the others little."""
EXTENTS_SHARE = 4
"""Reserved slots lie in at most this part of the extents, or in one if there are fewer: an extent
with a reserved slot cannot change its class, however small the slot is."""


class PageAhead(NamedTuple):
    """A page whose bytes are in a reserved slot.

    Attributes:
        space: its space.
        shard: its shard.
        key: its key.
        parent: the key before it; empty at the start of a chain.
        tokens: its tokens, or empty.
    """

    space: PrefixTree
    shard: int
    key: PrefixKey
    parent: PrefixKey
    tokens: bytes = b""


class SlotsAhead:
    """The reserved slots of one node.

    Args:
        residents: the pages, and where they are.
        room: allocates slots.

    Attributes:
        size_bytes: size of all reserved slots.
        slots: number of reserved slots.
    """

    def __init__(self, residents: Residents, room: Room) -> None:
        self._held = residents
        self._room = room
        self.size_bytes = 0
        self.slots = 0
        #: Number of a space, shard → the space, and when its reserved slot was used last.
        self.used: dict[tuple[int, int], tuple[PrefixTree, int]] = {}
        #: Position of an extent → reserved slots in it.
        self._extents: Counter[int] = Counter()

    def reserve(self, process: Process, put_id: int, space: PrefixTree, shard: int) -> Put | None:
        """Reserve a slot for the next page of a shard; None if none can be spared.

        Raises:
            InvalidArgument: a put has that number.
        """
        if put_id in process.puts:
            raise InvalidArgument("ahead", f"{put_id} is in use")
        size, held = space.shards[shard].slot_bytes, self._held
        mine = [put for put in process.puts.values() if put.ahead]
        if len(mine) >= AHEAD_MAX or any(put.is_of(space, shard) for put in mine):
            return None
        if not self._may_cost(process, space, size):
            return None
        with held.eviction.sparing(max(1, held.moment.now_ns)):  # not what was stored just now
            slots = self._room.allocate(space, space.root, size, 1)
        if not slots or not self._may_lie_in(held.slots.position(slots[0])):
            held.slots.abort(slots)
            return None
        put = process.puts[put_id] = Put(
            space, shard, [], slots, size, held.moment.now_ns, ahead=True
        )
        process.charge(size)
        self._count(put, 1)
        return put

    def store(self, process: Process, put_id: int, page: PageAhead) -> PageStatus | None:
        """Turn a reserved slot into an open put of a page.

        Returns:
            None on success: commit the put. Otherwise why the page cannot be put; the slot stays
            reserved.

        Raises:
            InvalidArgument: there is no such slot, or it is reserved for another shard.
        """
        space, shard, key, parent, tokens = page
        put = process.puts.get(put_id)
        if put is None or not put.ahead or not put.is_of(space, shard):
            raise InvalidArgument("put", f"{put_id} is not a slot reserved for this shard")
        self._held.moment.tick += 1
        if process.session.prefill_s_per_token:
            space.prefill_s_per_token = process.session.prefill_s_per_token
        if parent == key:
            raise InvalidArgument("parent", "is the same as the key after it")
        known = known_pages(space, shard, key, 0, self._held.moment.tick)
        if known is not None:
            return known[0]
        new = new_pages(space, shard, [key], parent)
        self._held.counts["contradicting_pages"] += new.contradicts
        if new.refusal is not None:
            return new.refusal
        if not self._room.within_quota(space, space.shards[shard].slot_bytes, 1):
            return PageStatus.NO_ROOM
        new = new_pages(space, shard, [key], parent)  # a page before it may have left for that
        if new.refusal is not None:
            return new.refusal
        assert len(put.slots) == 1
        begin_pages(space, shard, [key], put.slots, parent, tokens, unknown=new.unknown)
        self._held.owners.add(put.slots, [key], space)
        put.keys, put.ahead, put.since_ns = [key], False, self._held.moment.now_ns
        self._count(put, -1)
        self._held.counts["stored_ahead_pages"] += 1
        self.used[space.number, shard] = space, max(1, self._held.moment.now_ns)
        return None

    def make_room(self) -> None:
        """Free one slot for each shard whose reserved slot was used, for its next page.

        Call it in a turn without a request: no client then waits for the eviction.
        """
        for (_, shard), (space, used_ns) in self.used.items():
            with self._held.eviction.sparing(used_ns):
                slots = self._room.allocate(space, space.root, space.shards[shard].slot_bytes, 1)
            assert len(slots) <= 1
            self._held.slots.abort(slots)
        self.used.clear()

    def go_on(
        self, process: Process, put_id: int, ahead_id: int, space: PrefixTree, shard: int
    ) -> Put | None:
        """Reserve the next slot as ``ahead_id``; reuse the slot of ``put_id`` if it was not needed.

        Raises:
            InvalidArgument: a put has that number.
        """
        if ahead_id in process.puts:
            raise InvalidArgument("ahead", f"{ahead_id} is in use")
        put = process.puts.get(put_id)
        if put is None or not put.ahead:
            return self.reserve(process, ahead_id, space, shard)
        process.puts[ahead_id] = process.puts.pop(put_id)
        return put

    def end(self, process: Process, put_id: int, *, writing: bool) -> None:
        """Give a reserved slot back; while ``writing``, its client may still write to it."""
        put = process.puts[put_id]
        assert put.ahead
        put.ahead = False
        self._count(put, -1)
        if writing:
            self._held.slots.lose(put.slots)
            put.lost = True
        else:
            self._held.slots.abort(put.slots)
            del process.puts[put_id]
            process.charge(-put.size_bytes)

    def _may_cost(self, process: Process, space: PrefixTree, size: int) -> bool:
        """Whether the node, the session and the space can spare one more slot of this size."""
        if (self.size_bytes + size) * AHEAD_SHARE > self._held.slots.capacity_bytes:
            return False
        session = process.session
        if size * AHEAD_SHARE > session.quota_bytes or not session.admits(size):
            return False
        return space.number not in self._held.quotas.limited

    def _may_lie_in(self, position: int) -> bool:
        """Whether one more slot may be reserved in this extent."""
        if position in self._extents:
            return True
        return len(self._extents) < max(1, len(self._held.slots.extents) // EXTENTS_SHARE)

    def _count(self, put: Put, change: int) -> None:
        position = self._held.slots.position(put.slots[0])
        self._extents[position] += change
        if not self._extents[position]:
            del self._extents[position]
        self.slots += change
        self.size_bytes += change * put.size_bytes
        assert self.slots >= 0
        assert self.size_bytes >= 0
