"""Steps that an engine computes on layer-wise loads, or others' loads, that have not ended. Pure.

An engine can begin a step before the previous step's loads are known to have succeeded
(asynchronous scheduling, pipeline stages). So that step may use KV that failed to load, too.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from kvstore.engine.messages import Store

STEPS_MAX: Final = 64
"""Maximum waiting steps; an engine starts a few ahead. A load of an older step has failed."""


class _LayeredStep(NamedTuple):
    """A step whose loads are not all known to have succeeded.

    Attributes:
        loads: its unfinished loads, and their blocks.
        tables: block tables of the requests that it computes.
        stores: stores of its results, if all loads succeed.
    """

    loads: dict[int, list[int]]
    tables: list[Sequence[int]]
    stores: list[Store]


class Judged(NamedTuple):
    """The outcome of finished steps.

    Attributes:
        good: stores to start: they store results of successful loads.
        dropped: stores that must not start.
        forgotten: blocks with failed loads, or computed on them.
    """

    good: list[Store]
    dropped: list[Store]
    forgotten: list[Sequence[int]]


class LayeredSteps:
    """The unfinished steps, in order; as many as an engine starts ahead."""

    def __init__(self) -> None:
        self._steps: deque[_LayeredStep] = deque()
        self._spoilt: set[int] = set()

    @property
    def waits(self) -> bool:
        """Whether stores of the newest step must wait."""
        return bool(self._steps)

    def begins(self, loads: Mapping[int, list[int]]) -> None:
        """A step starts.

        Args:
            loads: its loads, and their blocks.
        """
        if len(self._steps) >= STEPS_MAX:
            for job in list(self._steps[0].loads):
                self.ended(job, whole=False)
        if loads or self._steps:
            self._steps.append(_LayeredStep(dict(loads), [], []))

    def computes(self, table: Sequence[int]) -> None:
        """The newest step, which waits, computes a request with this block table."""
        self._steps[-1].tables.append(table)

    def withhold(self, store: Store) -> None:
        """Hold a store of the newest step, which waits."""
        self._steps[-1].stores.append(store)

    def ended(self, job: int, *, whole: bool) -> None:
        """A load has ended on all ranks, or one gave it up; unknown loads are ignored."""
        for step in self._steps:
            held = step.loads.pop(job, ())
            if not whole:
                self._spoilt.update(held)

    def judge(self) -> Judged:
        """Return the outcome of the loads that have ended, each once."""
        judged = Judged([], [], [])
        for step in self._steps if self._spoilt else ():
            judged.dropped.extend(step.stores)
            step.stores.clear()
            for table in step.tables:
                spoilt = (at for at, block in enumerate(table) if block in self._spoilt)
                judged.forgotten.append(table[next(spoilt, len(table)) :])
        self._spoilt.clear()
        while self._steps and not self._steps[0].loads:
            judged.good.extend(self._steps.popleft().stores)
        return judged
