"""Explanations of decisions that have ended, in as few bytes as they need.

The log keeps thousands of decisions, and each has the numbers of all engines. Names and roles are
nearly always those of the decision before, so they are stored once. Each row of numbers is stored
as one value if all are equal, else with as many bytes per number as the largest one needs.
"""

from collections.abc import Hashable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from conductor.routing.choices import Candidate, CandidateColumns, Candidates

_SHARED_MAX: Final = 256
_NARROW: Final = (np.uint8, np.uint16)


class SharedValues:
    """Values that several decisions have in common, kept once each."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Hashable] = {}

    def of(self, what: str, value: Hashable) -> Hashable:
        """The first value that was equal to this one, of those of the same column.

        Names of engines can be equal to roles.
        """
        if len(self._known) >= _SHARED_MAX:
            self._known.clear()
        return self._known.setdefault((what, value), value)


class _Table(NamedTuple):
    """An array of one or two dimensions; each row is its one value, or the bytes of all."""

    shape: tuple[int, ...]
    dtype: str
    rows: tuple[bytes | int | float, ...]


class PackedCandidates:
    """The same as :class:`Candidates`, smaller; made from it when a decision has ended.

    Args:
        candidates: not changed, and not kept.
        shared: of all decisions that are kept together.
    """

    __slots__ = ("_columns",)

    def __init__(self, candidates: Candidates, shared: SharedValues) -> None:
        self._columns: tuple[object, ...] = tuple(
            _packed(name, column, shared)
            for name, column in zip(CandidateColumns._fields, candidates.columns, strict=True)
        )

    def __iter__(self) -> Iterator[Candidate]:
        """Each engine's numbers."""
        columns: list[Any] = [
            _unpacked(one) if isinstance(one, _Table) else one for one in self._columns
        ]
        return iter(Candidates(*columns))


def _packed(name: str, column: object, shared: SharedValues) -> object:
    if isinstance(column, np.ndarray):
        rows = tuple([_row(row) for row in (column if column.ndim == 2 else (column,))])
        return _Table(column.shape, column.dtype.str, rows)
    assert isinstance(column, Hashable)
    return shared.of(name, column)


def _row(row: npt.NDArray[np.generic]) -> bytes | int | float:
    raw = row.tobytes()
    if raw == raw[: row.itemsize] * len(row):  # of few numbers much faster than to compare them
        value: int | float = row[0].item() if raw else 0
        return value
    if row.dtype.kind in "iu" and row.min() >= 0:
        for narrow in _NARROW:
            if row.max() <= np.iinfo(narrow).max:
                return row.astype(narrow).tobytes()
    return raw


def _unpacked(table: _Table) -> npt.NDArray[np.generic]:
    array: npt.NDArray[np.generic] = np.empty(table.shape, dtype=table.dtype)
    by_row = np.atleast_2d(array)  # a view
    for at, row in enumerate(table.rows):
        if isinstance(row, bytes):
            width = len(row) // table.shape[-1]
            kind = np.dtype(table.dtype) if width == array.itemsize else np.dtype(f"u{width}")
            by_row[at] = np.frombuffer(row, dtype=kind)
        else:
            by_row[at] = row
    return array
