"""Which extent another class of slots may get: an empty one, or the least recently used. Pure."""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvstore.state.tree.slots import Extent

Class = tuple[str, int]
"""The tenant and the size of slots."""


class Coldest(NamedTuple):
    """The least recently used extent of all classes but one, when it was looked for.

    Attributes:
        changes: :attr:`ColdestExtents.changes`.
        staying: positions of extents that were left out.
        used_at: when it was used last.
        position: None = there is none.
    """

    changes: int
    staying: Set[int]
    used_at: int
    position: int | None


@dataclass(slots=True, eq=False)
class ColdestExtents:
    """The least recently used extent of the other classes, for each class that has asked.

    Attributes:
        changes: how often an extent got another class, or was left to its own.
    """

    changes: int = 0
    _known: dict[Class, Coldest] = field(default_factory=dict)

    def find(
        self, extents: Sequence["Extent"], asked: Class, tick: int, staying: Set[int]
    ) -> int | None:
        """See :meth:`kvstore.state.tree.slots.SlotTable.colder_extent`."""
        known = self._known.get(asked)
        if known is None or known.staying != staying or not self._is_still(extents, known):
            known = self._known[asked] = self._scan(extents, asked, staying)
        found = known.position if known.used_at < tick else None
        assert found is None or (extents[found].domain, extents[found].slot_bytes) != asked
        return found

    def _is_still(self, extents: Sequence["Extent"], known: Coldest) -> bool:
        """Whether a scan would find the same: meanwhile the others can only have been used."""
        if known.changes != self.changes:
            return False
        extent = extents[known.position] if known.position is not None else None
        return extent is None or (extent.used_at == known.used_at and not extent.closed)

    def _scan(self, extents: Sequence["Extent"], asked: Class, staying: Set[int]) -> Coldest:
        candidates = [
            (extent.used_at, position)
            for position, extent in enumerate(extents)
            if extent.domain is not None
            and not extent.closed
            and extent.class_of != asked
            and position not in staying
        ]
        if not candidates:
            return Coldest(self.changes, staying, 0, None)
        return Coldest(self.changes, staying, *min(candidates))


def is_empty(extent: "Extent") -> bool:
    """Whether an extent belongs to a class, and all of its slots are FREE."""
    return extent.domain is not None and len(extent.free) == extent.count


def empty_of_others(extents: Sequence["Extent"], empty: Iterable[int], asked: Class) -> int | None:
    """Of the positions of empty extents one of another class, or one that was drained."""
    found: list[tuple[bool, int]] = []
    for position in empty:
        extent = extents[position]
        assert is_empty(extent)
        if (extent.draining or extent.class_of != asked) and not extent.retiring:
            # Memory of the same domain may be cut anew; another domain must get new memory.
            found.append((extent.domain != asked[0], position))
    return min(found)[1] if found else None
