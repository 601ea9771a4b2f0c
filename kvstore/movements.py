"""Pages that an operator moves between tiers: prefetched to memory, or demoted to the SSDs."""

from collections.abc import Sequence

from kvstore.errors import CapacityError, TierUnavailable
from kvstore.page import PrefixKey
from kvstore.state.diskjobs import Fetch
from kvstore.state.pages import PageTable
from kvstore.state.tree import Node, Space, is_live

AT_ONCE = 32
"""Pages of one prefetch that are on their way, and pinned, at a time."""


class Prefetch:
    """READY pages on their way to memory.

    Args:
        table: whose pages.
        space: of the pages.
        keys: consecutive.
        deadline_ns: nothing is begun later.
    """

    def __init__(
        self, table: PageTable, space: Space, keys: Sequence[PrefixKey], deadline_ns: int
    ) -> None:
        """Begin."""
        self._table = table
        packed = b"".join(keys)
        runs = [
            (node, shard)
            for shard in range(len(space.shards))
            for node in table.ready_run(space, shard, packed)
        ]
        self._missing = [(node, shard) for node, shard in runs if shard not in node.slots]
        self._total = len(self._missing)
        self._done = 0
        self._deadline_ns = deadline_ns
        self._fetches: list[tuple[Fetch, int]] = []
        self._go_on()

    def progress(self) -> tuple[int, int]:
        """Pages that are done, and pages in all."""
        self._go_on()
        return self._done, self._total

    def finished(self) -> bool:
        """Whether nothing of it is under way any more."""
        self._go_on()
        return not self._missing and not self._fetches

    def cancel(self) -> None:
        """Begin nothing more, and let go of what has come and what still will."""
        disk = self._table.disk
        assert disk is not None
        self._missing.clear()
        for fetch, _ in self._fetches:
            disk.loads.end_fetch(fetch)
        self._fetches.clear()

    def _go_on(self) -> None:
        disk = self._table.disk
        assert disk is not None
        for fetch, pages in list(self._fetches):
            if not fetch.outstanding:
                self._fetches.remove((fetch, pages))
                self._done += pages
                disk.loads.end_fetch(fetch)
        if self._table.now_ns >= self._deadline_ns:
            self._missing.clear()
        while self._missing and len(self._fetches) < AT_ONCE:
            node, shard = self._missing.pop(0)
            if is_live(node) and node.ready >> shard & 1:
                self._fetches.append((disk.loads.fetch([node], shard), 1))
            else:
                self._done += 1


class Demotion:
    """READY pages on their way to disk; memory lets go of them when they are there.

    Args:
        table: whose pages.
        space: of the pages.
        keys: consecutive.
        deadline_ns: nothing is begun later.
    """

    def __init__(
        self, table: PageTable, space: Space, keys: Sequence[PrefixKey], deadline_ns: int
    ) -> None:
        """Begin."""
        self._table = table
        nodes = [space.nodes[key] for key in keys if key in space.nodes]
        self._waiting = [node for node in nodes if node.slots]
        self._total = len(self._waiting)
        self._deadline_ns = deadline_ns
        self._go_on()

    def progress(self) -> tuple[int, int]:
        """Pages that are done, and pages in all."""
        self._go_on()
        return self._total - len(self._waiting), self._total

    def finished(self) -> bool:
        """Whether nothing of it is under way any more."""
        self._go_on()
        return not self._waiting

    def cancel(self) -> None:
        """Begin nothing more."""
        self._waiting.clear()

    def _go_on(self) -> None:
        """Write what is not on disk yet, then release from the tails on."""
        if self._table.now_ns >= self._deadline_ns:
            self._waiting.clear()
        for node in reversed(list(self._waiting)):
            if self._gone(node):
                self._waiting.remove(node)

    def _gone(self, node: Node) -> bool:
        disk = self._table.disk
        assert disk is not None
        if not is_live(node) or not node.slots:
            return True
        try:
            missing = [shard for shard in node.slots if not disk.ensure_written(node, shard)]
        except CapacityError:
            return True  # it must not go to disk, or there is no room: it stays where it is
        return not missing and self._table.release_memory(node)


class DiskMovements:
    """See :class:`kvstore.server.api.Movements`."""

    def __init__(self, table: PageTable) -> None:
        """Move pages of a table with a disk side."""
        self._table = table

    def prefetch(self, space: Space, keys: list[PrefixKey], deadline_ns: int) -> Prefetch:
        """Bring pages from the SSD into host memory, as far as that works by the deadline."""
        self._refuse_without_disk()
        return Prefetch(self._table, space, keys, deadline_ns)

    def demote(self, space: Space, keys: list[PrefixKey], deadline_ns: int) -> Demotion:
        """Write pages of host memory to the SSD, then let go of their memory."""
        self._refuse_without_disk()
        return Demotion(self._table, space, keys, deadline_ns)

    def _refuse_without_disk(self) -> None:
        if self._table.disk is None:
            raise TierUnavailable("this node has no SSD tier: give it ssd.directories")
