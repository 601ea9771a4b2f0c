"""When leases run out and pages expire, the earliest first."""

from collections.abc import Iterator
from itertools import count

from kvstore.state.tree.node import PrefixNode, is_live
from kvstore.state.tree.nodeheap import Entry, NodeHeap
from kvstore.state.tree.sessions import Lease, Process


class Deadlines:
    """Of one node: those that no longer count leave by themselves."""

    def __init__(self) -> None:
        #: (deadline_ns, number, process, number of the lease, lease)
        self._leases = NodeHeap(_is_held)
        #: (expires_ns, number, shard, node)
        self._pages = NodeHeap(_expires)
        self._sequence = count()

    def add_lease(self, process: Process, number: int, lease: Lease) -> None:
        """A process has a lease under a number."""
        self._leases.push((lease.deadline_ns, next(self._sequence), process, number, lease))

    def add_page(self, node: PrefixNode, shard: int, expires_ns: int) -> None:
        """A page that expires is READY."""
        self._pages.push((expires_ns, next(self._sequence), shard, node))

    def leases_due(self, now_ns: int, most: int) -> Iterator[tuple[Process, int, Lease]]:
        """Leases that have run out by ``now_ns``, with the process that has each, and its number.

        At most ``most`` entries are looked at.
        """
        for _ in range(most):
            if not self._leases or self._leases.first()[0] > now_ns:
                return
            entry = self._leases.pop()
            if _is_held(entry) and not entry[-1].expired:
                yield entry[2], entry[3], entry[4]

    def pages_due(self, now_ns: int, most: int) -> Iterator[tuple[PrefixNode, int]]:
        """Pages that have expired, as node and shard; at most ``most`` entries are looked at."""
        for _ in range(most):
            if not self._pages or self._pages.first()[0] > now_ns:
                return
            entry = self._pages.pop()
            if _expires(entry):
                yield entry[3], entry[2]

    def next_ns(self) -> int:
        """The earliest; 0 = none."""
        firsts = [heap.first()[0] for heap in (self._leases, self._pages) if heap]
        return min(firsts, default=0)


def _expires(deadline: Entry) -> bool:
    expires_ns, _, shard, node = deadline
    return is_live(node) and node.expires.get(shard) == expires_ns


def _is_held(deadline: Entry) -> bool:
    _, _, process, number, lease = deadline
    return process.leases.get(number) is lease
