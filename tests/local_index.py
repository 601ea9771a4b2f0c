"""An index without a process of its own."""

import mmap
import secrets
from collections.abc import Mapping

from kvstore.index.control import (
    Expect,
    Follow,
    IndexSettings,
    Source,
    Unexpect,
    Unfollow,
)
from kvstore.index.face import PresentIndex
from kvstore.index.layout import TableLayout
from kvstore.index.memory import TableMemory
from kvstore.index.service import IndexService
from kvstore.index.table import IndexReader
from kvstore.index.writer import SETS_MAX


def anonymous_memory(size: int) -> TableMemory:
    """Zeroed memory of this process alone; it has no descriptor."""
    return TableMemory(-1, mmap.mmap(-1, size))


class LocalIndex:
    """The index of :class:`kvstore.index.process.IndexProcess` in this process and its loop.

    Attributes:
        restarts: always 0.
    """

    def __init__(self, settings: IndexSettings) -> None:
        """Make an empty table.

        Args:
            settings: its settings.
        """
        memory = anonymous_memory(TableLayout(settings.entries_max, SETS_MAX).total_bytes)
        self._service = IndexService(memory, settings, secrets.randbits(64))
        self._table = IndexReader(memory.buffer)
        self.restarts = 0

    @property
    def fault_counts(self) -> Mapping[str, int]:
        """None: it has no process."""
        return {}

    def present(self) -> PresentIndex:
        """Its table, always, and its state."""
        return PresentIndex(self._table, self._service.report())

    def follow(self, source: Source) -> None:
        """Follow a source, in place of what was followed for its worker."""
        self._service.obey(Follow(source))

    def unfollow(self, worker: str) -> None:
        """Forget a worker, whether it was followed or only expected to have pages."""
        self._service.obey(Unfollow(worker))

    def expect(self, expected: Expect, table: IndexReader) -> None:
        """A worker will probably have some pages."""
        assert table is self._table
        self._service.obey(expected)

    def unexpect(self, expected: Expect) -> None:
        """It will not have them."""
        self._service.obey(Unexpect(expected))

    async def run(self) -> None:
        """Follow until cancelled."""
        await self._service.run()
