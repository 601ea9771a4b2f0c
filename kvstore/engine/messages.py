"""What the scheduler side tells the workers in each step, and what they tell back. Plain values.

Jobs are numbered by the scheduler. Block tables are given by group, blocks in page order.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.page import PrefixKeys


class Blocks(NamedTuple):
    """Where some pages of a job lie in one group.

    Attributes:
        group: place of the group in ``EngineFacts.groups``.
        first: index of the first of these pages in the job's keys.
        blocks: block numbers, those of a page together; 0 is the engine's null block, of which
            nobody reads: bytes that are not wanted go there.
    """

    group: int
    first: int
    blocks: list[int]


class Load(NamedTuple):
    """Pages to restore into a request's blocks."""

    job: int
    request: str
    keys: PrefixKeys
    blocks: list[Blocks]
    wait_s: float
    layerwise: bool


class Store(NamedTuple):
    """Pages to store from blocks that this step, or one before it, completes."""

    job: int
    keys: PrefixKeys
    blocks: list[Blocks]


@dataclass(slots=True)
class Step:
    """What the workers are to start in one step.

    Attributes:
        idle: the step computes nothing.
    """

    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    idle: bool = False


class End(NamedTuple):
    """How a job ended, on the ranks that have reported.

    Attributes:
        ranks: on how many.
        pages: leading pages that are there on all of those.
        seconds: the longest that moving them took there; 0.0 = not measured.
    """

    ranks: int
    pages: int
    seconds: float = 0.0


@dataclass(slots=True)
class Report:
    """What one or several workers have to say after a step.

    Attributes:
        ended: job to its end: it touches no blocks any more.
        late: jobs that a request waits for no longer, although they have not ended.
    """

    ended: dict[int, End] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.ended or self.late)

    def end(self, job: int, pages: int, seconds: float = 0.0) -> None:
        """One rank's job has ended."""
        self._add({job: End(1, pages, seconds)}.items())

    def joined(self, other: "Report") -> "Report":
        """What two ranks, or groups of ranks, have to say in one."""
        both = Report(dict(self.ended), self.late | other.late)
        both._add(other.ended.items())
        return both

    def _add(self, ends: Iterable[tuple[int, End]]) -> None:
        for job, end in ends:
            known = self.ended.get(job, End(0, end.pages))
            self.ended[job] = End(
                known.ranks + end.ranks,
                min(known.pages, end.pages),
                max(known.seconds, end.seconds),
            )
