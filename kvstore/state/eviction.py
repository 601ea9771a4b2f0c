"""Which page goes when room is needed: leaves in order, by slot size and by who must pay. Pure.

Pages of one tenant and one slot size share a queue; a space with a quota or a reservation has
queues of its own, so that its leaves can be found, or left alone, without looking at the others'.
"""

from collections.abc import Iterable

from kvstore.state.quotas import Quotas
from kvstore.state.slots import SlotTable
from kvstore.state.tree import EvictionQueue, Node, Space, is_live


class Eviction:
    """The choice of pages to evict.

    Args:
        slots: the slots of the host tier.
    """

    def __init__(self, slots: SlotTable) -> None:
        """Start with nothing to choose from."""
        self.quotas = Quotas()
        self._slots = slots
        self._queues: dict[tuple[str, int], EvictionQueue] = {}

    def offer(self, node: Node) -> None:
        """Tell that ``node`` may have become evictable."""
        if self.evictable(node):
            name = self.quotas.queue_name(node.space)
            for slot_bytes in classes(node):
                self._queue(name, slot_bytes).offer(node)

    def offer_all(self, nodes: Iterable[Node], *, anew: bool = False) -> None:
        """Offer many, of which some may be gone; ``anew``: their queue is another one now."""
        for node in nodes:
            if is_live(node):
                node.queued = () if anew else node.queued
                self.offer(node)

    def victim(self, space: Space, slot_bytes: int) -> Node | None:
        """The least recently used leaf of the class that may go for ``space``."""
        names = self.quotas.payers(space, slot_bytes)
        return self._oldest([(name, slot_bytes) for name in names])

    def own_victim(self, space: Space) -> Node | None:
        """The least recently used leaf of a space with limits."""
        name = self.quotas.queue_name(space)
        return self._oldest([(name, size) for size in {one.slot_bytes for one in space.shards}])

    def evictable(self, node: Node) -> bool:
        """Whether nothing forbids that the node's pages leave memory."""
        return (
            bool(node.slots)
            and not node.children_in_memory
            and not node.pins
            and is_live(node)
            and all(node.ready >> shard & 1 for shard in node.slots)
            and not any(self._slots.pinned(slot) for slot in node.slots.values())
        )

    def _oldest(self, queues: list[tuple[str, int]]) -> Node | None:
        found = [node for name in queues if (node := self._pop(*name)) is not None]
        chosen = min(found, key=lambda node: node.access, default=None)
        if len(found) > 1:
            for node in found:
                if node is not chosen:
                    self.offer(node)
        return chosen

    def _pop(self, name: str, slot_bytes: int) -> Node | None:
        queue = self._queue(name, slot_bytes)
        while (node := queue.pop()) is not None:
            if self.quotas.queue_name(node.space) != name:
                self.offer(node)  # its space got limits since, and with them queues of its own
            elif slot_bytes in classes(node) and self.evictable(node):
                return node
        return None

    def _queue(self, name: str, slot_bytes: int) -> EvictionQueue:
        queue = self._queues.get((name, slot_bytes))
        if queue is None:
            queue = self._queues[name, slot_bytes] = EvictionQueue(slot_bytes)
        return queue


def classes(node: Node) -> set[int]:
    """The slot sizes of the node's pages."""
    return {node.space.shards[shard].slot_bytes for shard in node.slots}
