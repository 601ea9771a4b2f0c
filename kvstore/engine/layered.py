"""Steps that an engine computes on layer-wise loads that have not ended yet. Pure.

An engine can begin a step before the previous step's loads are known to have succeeded
(asynchronous scheduling, pipeline stages). So that step may use KV that failed to load, too.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from kvstore.engine.messages import Store

STEPS_MAX: Final = 64
"""Steps that wait; an engine begins a few ahead. A load whose step is further back has failed."""


class _LayeredStep(NamedTuple):
    """A step that is not judged.

    Attributes:
        loads: its loads that have not ended, and their blocks.
        tables: block tables of the requests that it computes.
        stores: what is stored of it, if all came.
    """

    loads: dict[int, list[int]]
    tables: list[Sequence[int]]
    stores: list[Store]


class Judged(NamedTuple):
    """What is known of steps now.

    Attributes:
        good: stores to begin: what they store was computed on what came.
        dropped: stores that must not begin.
        forgotten: blocks that were computed on what did not come, or hold it.
    """

    good: list[Store]
    dropped: list[Store]
    forgotten: list[Sequence[int]]


class LayeredSteps:
    """The steps from the first one that is not judged on; as many as an engine begins ahead."""

    def __init__(self) -> None:
        self._steps: deque[_LayeredStep] = deque()
        self._spoilt: set[int] = set()

    @property
    def waits(self) -> bool:
        """Whether what the newest step stores must wait."""
        return bool(self._steps)

    def begins(self, loads: Mapping[int, list[int]]) -> None:
        """A step begins.

        Args:
            loads: its layer-wise loads, and their blocks.
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
        """The newest step, which waits, has something to store."""
        self._steps[-1].stores.append(store)

    def ended(self, job: int, *, whole: bool) -> None:
        """A load has ended on all ranks, or was given up by one; others than these do nothing."""
        for step in self._steps:
            held = step.loads.pop(job, ())
            if not whole:
                self._spoilt.update(held)

    def judge(self) -> Judged:
        """Say what follows from the loads that have ended; each thing once."""
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
