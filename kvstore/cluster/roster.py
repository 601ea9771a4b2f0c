"""The nodes of a cluster according to the records of a store. Pure."""

import math
from collections.abc import Mapping

from kvstore.cluster.records import NodeRecord, read_record


class Roster:
    """The nodes in a store, kept through its failures.

    A store that returns may have been emptied, and the other nodes need time to register again. So
    nodes that were known before stay until they are seen again, or for the duration of a lease.

    Args:
        hold_s: how long nodes from before stay after the store has returned.

    Attributes:
        nodes: by name.
        unreadable: number of records in the last answer that are left out.
    """

    def __init__(self, hold_s: float) -> None:
        self.nodes: dict[str, NodeRecord] = {}
        self.unreadable = 0
        self._hold_s = hold_s
        self._held: set[str] = set()
        self._until_s = math.inf

    def doubt(self) -> None:
        """The store is away, or may have been emptied: nodes that it does not list may exist."""
        self._held = set(self.nodes)
        self._until_s = math.inf

    def trust(self, now_s: float) -> None:
        """The store serves again: the other nodes register again from now on."""
        self._until_s = now_s + self._hold_s

    def tell(self, records: Mapping[str, bytes], now_s: float) -> None:
        """All records of the store at one time.

        Args:
            records: name → JSON, which anyone with access to the store can write.
            now_s: the time.
        """
        self._held -= records.keys()
        nodes = {name: self.nodes[name] for name in self._held}
        self.unreadable = 0
        for name, value in records.items():
            try:
                nodes[name] = read_record(name, value)
            except ValueError:
                self.unreadable += 1
        self.nodes = nodes
        self.expire(now_s)

    def expire(self, now_s: float) -> None:
        """Remove the nodes from before that have not registered again in time."""
        if now_s >= self._until_s:
            for name in self._held:
                del self.nodes[name]
            self._held.clear()

    def clear(self) -> None:
        """Forget all nodes."""
        self.nodes = {}
        self.unreadable = 0
        self._held.clear()
