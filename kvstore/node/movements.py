"""Pages that an operator moves between tiers: prefetched to memory, or demoted to the SSDs.

Each movement goes in short steps, so that nobody else waits for it; a step that gives seconds wants
to be gone on with after these.
"""

from collections import deque
from collections.abc import Generator, Sequence
from typing import Final

from kvstore.errors import CapacityError, InvalidArgument, TierUnavailable
from kvstore.page import PrefixKey
from kvstore.state.disk.pages import DiskPages
from kvstore.state.table.pages import PageTable
from kvstore.state.tree.prefix_tree import PrefixNode, PrefixTree, is_live
from kvstore.state.tree.sessions import Fetch

Moves = Generator[float | None, None, None]
"""The steps of a movement: seconds to wait before the next one, None = when it is its turn."""

AT_ONCE: Final = 32
"""Pages of one movement that are on their way, and pinned, at a time."""
PAGES_MAX: Final = 1 << 20
"""Pages of one movement: keys times shards."""
_STEP_KEYS: Final = 32
_BEGIN_AT_ONCE: Final = 4
"""Each may have to make room first."""
_POLL_S: Final = 0.02


class Prefetch:
    """READY pages on their way to memory.

    Args:
        table: whose pages; it has an SSD tier.
        space: of the pages.
        keys: consecutive.
        deadline_ns: nothing is begun later.

    Attributes:
        done: pages that are done, of ``total``.
    """

    def __init__(
        self, table: PageTable, space: PrefixTree, keys: Sequence[PrefixKey], deadline_ns: int
    ) -> None:
        _refuse_too_many(space, keys)
        self.done = self.total = 0
        self._table = table
        self._disk = _disk_of(table)
        self._space = space
        self._keys = keys
        self._deadline_ns = deadline_ns
        self._missing: deque[tuple[PrefixNode, int]] = deque()
        self._fetches: list[Fetch] = []

    def steps(self) -> Moves:
        """Find what is missing in memory, then load it."""
        for shard in range(len(self._space.shards)):
            yield from self._find(shard)
        self.total = len(self._missing)
        while self._missing or self._fetches:
            for fetch in [one for one in self._fetches if not one.outstanding]:
                self._fetches.remove(fetch)
                self._disk.loads.end_fetch(fetch)
                self.done += 1
            if self._table.now_ns >= self._deadline_ns:
                self._missing.clear()
            full = len(self._fetches) >= AT_ONCE or not self._missing
            yield _POLL_S if full else None
            for _ in range(min(_BEGIN_AT_ONCE, AT_ONCE - len(self._fetches))):
                self._begin()

    def cancel(self) -> None:
        """Begin nothing more, and let go of what has come and what still will."""
        self._missing.clear()
        for fetch in self._fetches:
            self._disk.loads.end_fetch(fetch)
        self._fetches.clear()

    def _find(self, shard: int) -> Moves:
        """The pages of the leading READY run of a shard that are on disk only."""
        for count, key in enumerate(self._keys, start=1):
            node = self._space.nodes.get(key)
            if node is None or not node.ready >> shard & 1:
                return
            if shard not in node.slots:
                self._missing.append((node, shard))
            if count % _STEP_KEYS == 0:
                yield None

    def _begin(self) -> None:
        if not self._missing:
            return
        node, shard = self._missing.popleft()
        if is_live(node) and node.ready >> shard & 1:
            self._fetches.append(self._disk.loads.fetch([node], shard))
        else:
            self.done += 1


class Demotion:
    """READY pages on their way to disk; memory lets go of them when they are there.

    What a page on disk needs before it is written first, also what was not asked for; memory then
    lets go from the tails on.

    Args:
        table: whose pages; it has an SSD tier.
        space: of the pages.
        keys: consecutive.
        deadline_ns: nothing is begun later.

    Attributes:
        done: nodes that are done, of ``total``.
    """

    def __init__(
        self, table: PageTable, space: PrefixTree, keys: Sequence[PrefixKey], deadline_ns: int
    ) -> None:
        _refuse_too_many(space, keys)
        self.done = self.total = 0
        self._table = table
        self._disk = _disk_of(table)
        self._space = space
        self._keys = keys
        self._deadline_ns = deadline_ns
        self._cancelled = False

    def steps(self) -> Moves:
        """Write what is not on disk yet, then release from the tails on."""
        nodes = yield from self._find()
        self.total = len(nodes)
        if nodes:
            heads = yield from self._heads(nodes[0])
            yield from self._write(heads)
        stay = yield from self._write(nodes)
        waiting = [node for node in nodes if node not in stay]
        self.done = len(stay)
        while waiting and not self._over:
            kept: list[PrefixNode] = []
            for count, node in enumerate(reversed(waiting), start=1):
                if is_live(node) and node.slots and not self._table.release_memory(node):
                    kept.append(node)
                else:
                    self.done += 1
                if count % _STEP_KEYS == 0:
                    yield None
            waiting = kept[::-1]
            if waiting:
                yield _POLL_S  # in use, or followed by pages in memory

    def cancel(self) -> None:
        """Begin nothing more."""
        self._cancelled = True

    @property
    def _over(self) -> bool:
        return self._cancelled or self._table.now_ns >= self._deadline_ns

    def _find(self) -> Generator[float | None, None, list[PrefixNode]]:
        found: list[PrefixNode] = []
        for count, key in enumerate(self._keys, start=1):
            node = self._space.nodes.get(key)
            if node is not None and node.slots:
                found.append(node)
            if count % _STEP_KEYS == 0:
                yield None
        return found

    def _heads(self, first: PrefixNode) -> Generator[float | None, None, list[PrefixNode]]:
        """The pages before a page that are not on disk yet, the first one first."""
        heads: list[PrefixNode] = []
        at = first.parent
        while at is not None and at is not self._space.root and at.slots.keys() - at.disk.keys():
            heads.append(at)
            at = at.parent
            if len(heads) % (_STEP_KEYS * 8) == 0:
                yield None
        return heads[::-1]

    def _write(self, nodes: Sequence[PrefixNode]) -> Generator[float | None, None, set[PrefixNode]]:
        """Write pages, heads first and a few at a time; returns the nodes that cannot be."""
        under_way: deque[PrefixNode] = deque()
        refused: set[PrefixNode] = set()
        for node in nodes:
            while len(under_way) >= AT_ONCE:
                if self._over:
                    return refused
                if self._written(under_way[0], refused):
                    under_way.popleft()
                else:
                    yield _POLL_S
            if not self._written(node, refused):
                under_way.append(node)
                if len(under_way) % (_STEP_KEYS // 4) == 0:
                    yield None
        while under_way and not self._over:
            if self._written(under_way[0], refused):
                under_way.popleft()
            else:
                yield _POLL_S
        return refused

    def _written(self, node: PrefixNode, refused: set[PrefixNode]) -> bool:
        """Whether a node's pages are on disk, or never will be; they are on their way now."""
        if not is_live(node):
            return True
        try:
            there = [self._disk.ensure_written(node, shard) for shard in node.slots]
        except CapacityError:
            refused.add(node)  # it must not go to disk, or there is no room: it stays where it is
            return True
        return all(there)


def _disk_of(table: PageTable) -> DiskPages:
    if table.disk is None:
        raise TierUnavailable("this node has no SSD tier: give it ssd.directories")
    return table.disk


def _refuse_too_many(space: PrefixTree, keys: Sequence[PrefixKey]) -> None:
    if len(keys) * len(space.shards) > PAGES_MAX:
        what = f"{len(keys)} keys of {len(space.shards)} shards are more than {PAGES_MAX} pages"
        raise InvalidArgument("keys", f"{what}; move fewer at a time")
