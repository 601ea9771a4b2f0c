"""Deadlines of leases, of pages with a TTL, and of lost processes. Pure."""

from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Final

from kvstore.state.table.residents import Residents
from kvstore.state.tree.node import PrefixNode, is_live
from kvstore.state.tree.nodeheap import Entry, NodeHeap
from kvstore.state.tree.sessions import Lease, Process
from kvstore.state.tree.slots import Slot, SlotTable


class Deadlines:
    """Leases and pages of one node, ordered by deadline; those that no longer count are removed."""

    def __init__(self) -> None:
        #: (deadline_ns, number, process, number of the lease, lease)
        self._leases = NodeHeap(_is_held)
        #: (expires_ns, number, shard, node)
        self._pages = NodeHeap(_expires)
        self._sequence = count()

    def add_lease(self, process: Process, number: int, lease: Lease) -> None:
        """Add a lease of a process under its number."""
        self._leases.push((lease.deadline_ns, next(self._sequence), process, number, lease))

    def add_page(self, node: PrefixNode, shard: int, expires_ns: int) -> None:
        """Add a READY page that expires."""
        self._pages.push((expires_ns, next(self._sequence), shard, node))

    def leases_due(self, now_ns: int, most: int) -> Iterator[tuple[Process, int, Lease]]:
        """Leases that have expired by ``now_ns``, each with its process and number.

        At most ``most`` entries are examined.
        """
        for _ in range(most):
            if not self._leases or self._leases.first()[0] > now_ns:
                return
            entry = self._leases.pop()
            if _is_held(entry) and not entry[-1].expired:
                yield entry[2], entry[3], entry[4]

    def pages_due(self, now_ns: int, most: int) -> Iterator[tuple[PrefixNode, int]]:
        """Pages that have expired, as node and shard; at most ``most`` entries are examined."""
        for _ in range(most):
            if not self._pages or self._pages.first()[0] > now_ns:
                return
            entry = self._pages.pop()
            if _expires(entry):
                yield entry[3], entry[2]

    def next_ns(self) -> int:
        """The earliest deadline; 0 = none."""
        firsts = [heap.first()[0] for heap in (self._leases, self._pages) if heap]
        return min(firsts, default=0)


def _expires(deadline: Entry) -> bool:
    expires_ns, _, shard, node = deadline
    return is_live(node) and node.expires.get(shard) == expires_ns


def _is_held(deadline: Entry) -> bool:
    _, _, process, number, lease = deadline
    return process.leases.get(number) is lease


AGAIN_NS: Final = 1_000_000_000
"""How long an extent that another client still reads or writes is left alone."""
VACATE_PAGES: Final = 200
"""Pages that one turn evicts from all extents, beside what leaves with the last of them."""
LOOKS_MAX = 1 << 15
"""Slots of extents, and of what lost processes hold, that one turn looks at, beside those of the
last extent."""


class Retirement:
    """The retiring extents of one node.

    The kernel tells a node when the process behind a connection ends. For a process in another PID
    namespace, an old kernel cannot: the slots that such a process held when its connection broke
    could never be reused. So, after a time limit, all extents that the process may still read or
    write are **retired**: none of their slots is allocated any more, their pages are evicted, and
    once no other client reads or writes there, they get new memory under a new number. A late write
    then hits no page.

    Args:
        residents: the pages, and where they are.
        after_ns: how long to wait for the end of a lost process that cannot be watched.
    """

    def __init__(self, residents: Residents, after_ns: int) -> None:
        self._residents = residents
        self._after_ns = after_ns
        self._again_ns = 0
        #: Positions of the extents that are retiring, also when those they retire for have ended.
        self._retiring: set[int] = set()
        #: Those of them that were not looked at since all were looked at last.
        self._next: list[int] = []
        #: Lost processes that nobody watches, and when each was lost; the longest lost first.
        self._lost: dict[Process, int] = {}

    def __len__(self) -> int:
        return len(self._lost)

    def add(self, process: Process, now_ns: int) -> None:
        """The connection of an unwatched process broke; the process may still access its slots."""
        assert process.lost
        assert not process.peer.watched
        self._lost.setdefault(process, now_ns)

    def remove(self, process: Process) -> None:
        """The process is known not to access anything any more."""
        self._lost.pop(process, None)

    def next_deadline_ns(self) -> int:
        """When :meth:`advance` has something to do; 0 = never."""
        if self._retiring:
            return self._again_ns
        first = next(iter(self._lost.values()), None)
        return 0 if first is None else max(first + self._after_ns, self._again_ns)

    def advance(self, now_ns: int) -> list[Process]:
        """Retire the extents of processes whose time is up, unless other clients need them.

        Each turn goes on where the one before it has stopped.

        Returns:
            the processes that hold nothing any more.
        """
        given_up = [
            process for process, lost in self._lost.items() if lost + self._after_ns <= now_ns
        ]
        if now_ns < self._again_ns or not (given_up or self._retiring):
            return []
        assert all(process.lost for process in given_up), "an engine still writes there"
        slots = self._residents.slots
        if not self._next:
            self._retire(given_up)
        pages_left, looks_left = VACATE_PAGES, LOOKS_MAX
        while self._next and looks_left > 0:
            position = self._next[-1]
            pages_left -= self._residents.vacate(position, pages_left)
            if pages_left <= 0:
                break
            self._next.pop()
            held, looked = _held(slots, given_up, position)
            looks_left -= slots.extents[position].count + looked
            if slots.retirable(position, held):
                slots.replace(position)
                self._retiring.remove(position)
                for process in given_up:
                    _forfeit(slots, process, position)
        self._again_ns = now_ns if self._next else now_ns + AGAIN_NS
        ended = [process for process in given_up if process.idle]
        for process in ended:
            del self._lost[process]
        return ended

    def _retire(self, given_up: list[Process]) -> None:
        """Allocate no slot any more in the extents of these processes; look at all that retire."""
        slots = self._residents.slots
        positions = {slots.position(slot) for process in given_up for slot in _slots_of(process)}
        for position in positions - self._retiring:
            slots.retire(position)
            self._retiring.add(position)
            self._residents.counts["retired_extents"] += 1
        self._next = list(self._retiring)


def _slots_of(process: Process) -> Iterator[Slot]:
    """The slots that a lost process may still access."""
    for lease in process.leases.values():
        yield from lease.slots if lease.expired else ()
    for put in process.puts.values():
        yield from put.slots


def _held(slots: SlotTable, given_up: list[Process], position: int) -> tuple[Counter[Slot], int]:
    """How often each slot of an extent is held by these processes; slots that were looked at."""
    held, looked = Counter[Slot](), 0
    for process in given_up:
        for slot in _slots_of(process):
            looked += 1
            if slots.position(slot) == position:
                held[slot] += 1
    return held, looked


def _forfeit(slots: SlotTable, process: Process, position: int) -> None:
    """Free what the process held in an extent whose memory was replaced."""
    at = slots.position
    for lease_id, lease in list(process.leases.items()):
        gone = [slot for slot in lease.slots if at(slot) == position]
        assert lease.expired or not gone
        size = lease.size_bytes * len(gone) // max(1, len(lease.slots))  # all are of one shard
        lease.slots = [slot for slot in lease.slots if at(slot) != position]
        lease.size_bytes -= size
        process.charge(-size)
        if not lease.slots:
            del process.leases[lease_id]
    for put_id, put in list(process.puts.items()):
        assert put.lost
        each = put.space.shards[put.shard].slot_bytes
        left = [slot for slot in put.slots if at(slot) != position]
        size = each * (len(put.slots) - len(left))
        put.slots = left
        put.size_bytes -= size
        process.charge(-size)
        if not left:
            del process.puts[put_id]
