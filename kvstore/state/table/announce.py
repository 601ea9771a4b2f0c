"""Announces the pages that were found on disk at the start, a few at a time. Pure.

This is not urgent: an index that does not know a page yet only misses it.
"""

from collections import deque
from itertools import islice
from typing import Final

from kvstore.state.disk.checks import CheckRun
from kvstore.state.table.pages import PageTable
from kvstore.state.tree.actions import TierStored
from kvstore.state.tree.node import PrefixNode

SHELVES: Final = 2
"""Shelves per step: about 500 pages, two or three milliseconds."""
READ_NS: Final = 5_000_000_000
"""Maximum wait for the tokens of these pages; then they are announced without the missing ones."""


class Announcement:
    """The pages on disk of one page table, in the order they were found: mostly parents first.

    Args:
        table: the page table; none of its pages has been announced yet.
        tokens: also announce their tokens, which are first read from their records.
    """

    def __init__(self, table: PageTable, *, tokens: bool = False) -> None:
        self._tokens = tokens
        #: Reads the tokens of the pages that are told of next, until a time.
        self._reading: tuple[CheckRun, int] | None = None
        self._waiting = deque(
            (space, number) for space in table.spaces for number in space.by_creation.numbers(0)
        )

    @property
    def done(self) -> bool:
        """Whether all pages have been announced."""
        return not self._waiting

    def step(self, table: PageTable) -> None:
        """Announce some of the pages that are on disk now."""
        assert self._waiting
        pages = [
            (node, shard)
            for space, number in islice(self._waiting, SHELVES)
            for shard in range(len(space.shards))
            for node in space.by_creation.nodes(number)
            if node.on_disk >> shard & 1
        ]
        if self._tokens and self._is_reading(table, pages):
            return
        found = self._reading[0].tokens if self._reading is not None else {}
        for node, shard in pages:
            token_ids = [found.get((node.space.number, key), b"") for key in node.key_list()]
            if all(token_ids) or not any(token_ids):
                table.residents.emit(TierStored, node, shard, "ssd", b"".join(token_ids))
                continue
            for page, tokens in zip(node.copies(), token_ids, strict=True):
                table.residents.emit(TierStored, page, shard, "ssd", tokens)
        self._reading = None
        for _ in range(min(SHELVES, len(self._waiting))):
            self._waiting.popleft()

    def _is_reading(self, table: PageTable, pages: list[tuple[PrefixNode, int]]) -> bool:
        """Whether tokens of some pages are still being read; starts to read them."""
        if self._reading is None:
            unknown = [page for page in pages if not page[0].tokens]
            self._reading = table.disk.read_tokens(unknown), table.now_ns + READ_NS
        run, until_ns = self._reading
        if table.now_ns >= until_ns:
            run.cancel()
            return False
        return not run.finished
