"""Requests that wait, in columns that are changed row by row. Pure.

Thousands may wait, and each arrival and each assignment changes one row.
"""

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, Final, NamedTuple

import numpy as np

from conductor.routing.columns import Matches, Waiting
from kvstore.index.layout import Words


class WaitingRow(NamedTuple):
    """A row of :class:`Waiting`; ``None`` in place of results: they are looked up when needed."""

    number: int
    model: str
    arrived: float
    deadline: float
    half: float
    excluded: frozenset[str]
    tokens: int | None
    keys: Words
    priority: int
    tenant: str
    session: str
    matches: Matches
    least_s: float
    bound: str
    output: float
    found: None = None


_SECONDS: Final = ("arrived", "deadline", "half", "least_s")
"""Fields of which each step reads all rows: NumPy copies arrays at once."""
_Kind = tuple[str, frozenset[str], str]
"""Model, engines that have failed, and the engine for which a request waits."""


class WaitingRows:
    """Requests in order of their numbers.

    Attributes:
        columns: the same object always; whoever reads it may keep it until the next change.
    """

    def __init__(self, rows: Iterable[WaitingRow] = ()) -> None:
        self._lists: list[Any] = [
            array("d") if name in _SECONDS else [] for name in WaitingRow._fields
        ]
        self._kinds: list[int] = []
        self._numbers: dict[_Kind, int] = {}  # of each kind
        self._of_kind: dict[int, int] = {}
        self._named = 0
        named = (one.name for one in fields(Waiting))
        self.columns = Waiting(
            **dict(zip(named, self._lists, strict=False)),
            kinds=self._kinds,
            of_kind=self._of_kind,
        )
        for row in rows:
            self.add(row)

    def add(self, row: WaitingRow) -> None:
        """A request waits."""
        at = self.at(row.number)
        for column, value in zip(self._lists, row, strict=True):
            column.insert(at, value)
        self._kinds.insert(at, self._count((row.model, row.excluded, row.bound)))

    def drop(self, number: int) -> None:
        """A request waits no more."""
        at = self.at(number)
        self._discount(at)
        del self._kinds[at]
        for column in self._lists:
            del column[at]

    def bind(self, number: int, engine: str) -> None:
        """A request waits for this engine from now on."""
        at, columns = self.at(number), self.columns
        self._discount(at)
        columns.bound[at] = engine
        self._kinds[at] = self._count((columns.models[at], columns.excluded[at], engine))

    def at(self, number: int) -> int:
        """The row of a request, or where it would be."""
        return bisect_left(self.columns.numbers, number)

    def wake_at(self, since: float) -> float:
        """When the next deadline is, or the half of a wait for an engine; infinite = never.

        Args:
            since: the halves up to this time have been looked at.
        """
        rows = self.columns
        first = float(np.array(rows.deadlines).min(initial=math.inf))
        if not any(bound for _, _, bound in self._numbers):
            return first
        halves = zip(rows.halves, rows.bound, strict=True)
        return min(first, *[half for half, bound in halves if bound and half > since], math.inf)

    def _count(self, kind: _Kind) -> int:
        if kind not in self._numbers:
            self._named += 1
            self._numbers[kind] = self._named
        number = self._numbers[kind]
        self._of_kind[number] = self._of_kind.get(number, 0) + 1
        return number

    def _discount(self, at: int) -> None:
        number = self._kinds[at]
        self._of_kind[number] -= 1
        if not self._of_kind[number]:
            del self._of_kind[number]
            columns = self.columns
            del self._numbers[columns.models[at], columns.excluded[at], columns.bound[at]]

    def check(self, rows: Iterable[WaitingRow]) -> None:
        """Assert that the rows are these."""
        columns, same = self.columns, WaitingRows(rows).columns
        kinds = dict(zip(columns.kinds, same.kinds, strict=True))
        of_kind = {kinds[one]: count for one, count in columns.of_kind.items()}
        kinds_now = [kinds[one] for one in columns.kinds]
        now = replace(columns, found=same.found, kinds=kinds_now, of_kind=of_kind)
        assert now == same
