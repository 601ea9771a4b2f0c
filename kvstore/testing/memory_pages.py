"""A store of entries in memory: what Redis does, with a clock that only tests move."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Final

from kvstore.cluster.entries import NAME_BYTES, FoundEntries, NumberHolder, numbers_of
from kvstore.cluster.page_store import AnnouncedNumber, ChangedPages, DirectoryFault

ENTRY_MS: Final = 3_600_000
NUMBER_MS: Final = 30_000


@dataclass
class _Number:
    holder: NumberHolder
    token: str
    until: int
    free_at: int
    batch: int = 0


@dataclass
class MemoryPages:
    """A :class:`kvstore.cluster.page_store.PageStore` in memory; all nodes use the same object.

    Attributes:
        now_ms: its clock.
        away: whether calls fail.
    """

    now_ms: int = 0
    away: bool = False
    _entries: dict[bytes, tuple[str, int]] = field(default_factory=dict)
    _numbers: dict[int, _Number] = field(default_factory=dict)
    _saved: tuple[dict[bytes, tuple[str, int]], dict[int, _Number]] = field(
        default_factory=lambda: ({}, {})
    )

    def empty(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._numbers.clear()

    def save(self) -> None:
        """Keep what it has now for :meth:`set_back`."""
        self._saved = deepcopy((self._entries, self._numbers))

    def set_back(self) -> None:
        """Have again just what it had at :meth:`save`."""
        self._entries, self._numbers = deepcopy(self._saved)

    async def claim(self, node: str, boot: bytes, token: str) -> int:
        """See :meth:`kvstore.cluster.page_store.PageStore.claim`."""
        self._come()
        for number, one in list(self._numbers.items()):
            if one.free_at <= self.now_ms:
                del self._numbers[number]
            elif one.token == token:
                return number
            elif one.holder.node == node and one.holder.boot != boot:
                one.until = 0
        number = next(n for n in range(1, len(self._numbers) + 2) if n not in self._numbers)
        self._numbers[number] = _Number(NumberHolder(node, boot), token, 0, 0)
        self._prolong(self._numbers[number])
        return number

    async def change(
        self, number: int, token: str, batch: int, changes: Sequence[ChangedPages]
    ) -> bool:
        """See :meth:`kvstore.cluster.page_store.PageStore.change`."""
        self._come()
        own = self._numbers.get(number)
        if own is None or own.token != token or own.until <= self.now_ms:
            return False
        if own.batch != batch:
            if own.batch != batch - 1:
                return False
            for one in changes:
                for at in range(0, len(one.names), NAME_BYTES):
                    self._change(
                        one.names[at : at + NAME_BYTES], f"{one.sign}{number}", stored=one.stored
                    )
            own.batch = batch
        return True

    async def renew(self, numbers: Mapping[int, AnnouncedNumber]) -> list[int]:
        """See :meth:`kvstore.cluster.page_store.PageStore.renew`."""
        self._come()
        lost = []
        for number, (token, batch) in numbers.items():
            own = self._numbers.get(number)
            if own is None or own.token != token or own.until <= self.now_ms or own.batch < batch:
                lost.append(number)
            else:
                self._prolong(own)
        return lost

    async def withdraw(self, number: int, token: str) -> None:
        """See :meth:`kvstore.cluster.page_store.PageStore.withdraw`."""
        self._come()
        own = self._numbers.get(number)
        if own is not None and own.token == token:
            own.until = 0

    async def find(self, shards: Sequence[bytes]) -> FoundEntries:
        """See :meth:`kvstore.cluster.page_store.PageStore.find`."""
        self._come()
        runs = []
        for names in shards:
            each = [names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)]
            runs.append([(1, self._text(name)) for name in each])
        holders = {n: one.holder for n, one in self._numbers.items() if one.until > self.now_ms}
        return FoundEntries(runs, holders)

    def _come(self) -> None:
        if self.away:
            raise DirectoryFault("away", "it is away")

    def _prolong(self, one: _Number) -> None:
        one.until = self.now_ms + NUMBER_MS
        one.free_at = one.until + ENTRY_MS + 1

    def _text(self, name: bytes) -> str:
        text, until = self._entries.get(name, ("", 0))
        return text if until > self.now_ms else ""

    def _change(self, name: bytes, member: str, *, stored: bool) -> None:
        text, until = self._text(name), self._entries.get(name, ("", 0))[1]
        kept = [one for one in text.split(",") if one != member and self._is_live(one)]
        if stored:
            kept, until = [*kept, member], self.now_ms + ENTRY_MS
        if kept:
            self._entries[name] = (",".join(kept), until)
        else:
            self._entries.pop(name, None)

    def _is_live(self, member: str) -> bool:
        return any(
            number in self._numbers and self._numbers[number].until > self.now_ms
            for number in numbers_of(member)
        )
