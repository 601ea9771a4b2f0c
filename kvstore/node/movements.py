"""Moves pages between tiers for an operator: prefetch to memory, or demote to the SSDs.

A movement runs in short steps, so that it does not delay others. A step may yield the number of
seconds to wait before the next one.
"""

from collections import deque
from collections.abc import Generator, Sequence
from typing import Final

from kvstore.protocol.errors import CapacityError, InvalidArgument, TierUnavailable
from kvstore.protocol.page import PrefixKey
from kvstore.state.table.pages import PageTable
from kvstore.state.tree.node import PrefixNode, is_live
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.sessions import Fetch

Moves = Generator[float | None, None, None]
"""The steps of a movement: seconds to wait before the next one; None = in the next turn."""

AT_ONCE: Final = 32
"""Maximum pages of one movement that are loaded or written, and pinned, at a time."""
PAGES_MAX: Final = 1 << 20
"""Maximum pages of one movement: keys times shards."""
_STEP_KEYS: Final = 32
_BEGIN_AT_ONCE: Final = 4
"""Loads started in one step; each may have to evict pages first."""
_POLL_S: Final = 0.02


class Prefetch:
    """Loads READY pages from disk to memory.

    Args:
        table: the page table; must have an SSD tier.
        space: space of the pages.
        keys: consecutive keys.
        deadline_ns: after this, no more loads are started.

    Attributes:
        done: number of finished pages, of ``total``.
    """

    def __init__(
        self, table: PageTable, space: PrefixTree, keys: Sequence[PrefixKey], deadline_ns: int
    ) -> None:
        _refuse_too_many(space, keys)
        self.done = self.total = 0
        self._table = table
        _refuse_without_disk(table)
        self._space = space
        self._keys = keys
        self._deadline_ns = deadline_ns
        self._missing: deque[tuple[PrefixNode, int]] = deque()
        self._fetches: list[Fetch] = []

    def steps(self) -> Moves:
        """Find the pages that are missing in memory, then load them."""
        for shard in range(len(self._space.shards)):
            yield from self._find(shard)
        self.total = len(self._missing)
        while self._missing or self._fetches:
            for fetch in [one for one in self._fetches if not one.waits]:
                self._fetches.remove(fetch)
                self._table.residents.unpin(self._table.fetches.end(fetch))
                self.done += 1
            if self._table.now_ns >= self._deadline_ns:
                self._missing.clear()
            full = len(self._fetches) >= AT_ONCE or not self._missing
            yield _POLL_S if full else None
            for _ in range(min(_BEGIN_AT_ONCE, AT_ONCE - len(self._fetches))):
                self._begin()
            assert self.done <= self.total

    def cancel(self) -> None:
        """Start no more loads, and release pages that were or will be loaded."""
        self._missing.clear()
        for fetch in self._fetches:
            self._table.residents.unpin(self._table.fetches.end(fetch))
        self._fetches.clear()

    def _find(self, shard: int) -> Moves:
        """The pages of a shard's leading READY run that are only on disk."""
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
            self._fetches.append(fetch := Fetch())
            assert len(self._fetches) <= AT_ONCE
            self._table.room.load(fetch, [node], shard)
        else:
            self.done += 1


class Demotion:
    """Writes READY pages to disk, then evicts them from memory.

    Missing pages before them are written first, even if they were not requested; eviction starts
    with the last pages of the chain.

    Args:
        table: the page table; must have an SSD tier.
        space: space of the pages.
        keys: consecutive keys.
        deadline_ns: after this, nothing more is started.

    Attributes:
        done: number of finished nodes, of ``total``.
    """

    def __init__(
        self, table: PageTable, space: PrefixTree, keys: Sequence[PrefixKey], deadline_ns: int
    ) -> None:
        _refuse_too_many(space, keys)
        self.done = self.total = 0
        self._table = table
        _refuse_without_disk(table)
        self._space = space
        self._keys = keys
        self._deadline_ns = deadline_ns
        self._cancelled = False

    def steps(self) -> Moves:
        """Write pages that are not on disk, then evict, starting with the last ones."""
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
                if is_live(node) and node.slots and not self._table.residents.release_memory(node):
                    kept.append(node)
                else:
                    self.done += 1
                if count % _STEP_KEYS == 0:
                    yield None
            waiting = kept[::-1]
            if waiting:
                yield _POLL_S  # in use, or pages after it are in memory
        assert self.done <= self.total

    def cancel(self) -> None:
        """Start nothing more."""
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
        """The pages before a page that are not on disk, in chain order."""
        heads: list[PrefixNode] = []
        at = first.parent
        while at is not None and at is not self._space.root and at.slots.keys() - at.disk.keys():
            heads.append(at)
            at = at.parent
            if len(heads) % (_STEP_KEYS * 8) == 0:
                yield None
        return heads[::-1]

    def _write(self, nodes: Sequence[PrefixNode]) -> Generator[float | None, None, set[PrefixNode]]:
        """Write pages in chain order, a few at a time; returns the nodes that cannot be written."""
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
        """Whether a node's pages are on disk or never will be; otherwise starts to write them."""
        if not is_live(node):
            return True
        try:
            there = [self._table.tiers.ensure_written(node, shard) for shard in node.slots]
        except CapacityError:
            refused.add(node)  # not allowed on disk, or no free space: it stays in memory
            return True
        return all(there)


def _refuse_without_disk(table: PageTable) -> None:
    if not table.disk.exists:
        raise TierUnavailable("this node has no SSD tier: set ssd.directories")


def _refuse_too_many(space: PrefixTree, keys: Sequence[PrefixKey]) -> None:
    if len(keys) * len(space.shards) > PAGES_MAX:
        what = f"{len(keys)} keys of {len(space.shards)} shards are more than {PAGES_MAX} pages"
        raise InvalidArgument("keys", f"{what}; move fewer at a time")
