"""Messages between the scheduler side and the workers in each step. Plain values.

The scheduler numbers jobs. Block tables are given by group, blocks in page order.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.protocol.page import PrefixKeys


class Blocks(NamedTuple):
    """The blocks of some pages of a job in one group.

    Attributes:
        group: index of the group in ``EngineFacts.groups``.
        first: index of the first page in the job's keys.
        blocks: block numbers in page order. 0 is the engine's null block, which is never read: it
            takes bytes that are not needed.
    """

    group: int
    first: int
    blocks: list[int]


class Load(NamedTuple):
    """Pages to restore into a request's blocks.

    Attributes:
        known: tokens of the first page that the engine has already.
    """

    job: int
    request: str
    keys: PrefixKeys
    blocks: list[Blocks]
    wait_s: float
    layerwise: bool
    known: int = 0


class Store(NamedTuple):
    """Pages to store from blocks that are complete after this step.

    Attributes:
        page: number of the first page in its prompt, from 0.
    """

    job: int
    keys: PrefixKeys
    blocks: list[Blocks]
    page: int = 0


@dataclass(slots=True)
class Step:
    """The jobs that the workers start in one step.

    Attributes:
        idle: the step computes nothing, and no rank waits for the others with a load: the engine
            may wait shortly for a load.
        others: number of what others than this adapter load in the step for requests that it
            computes; the workers report its end with the step. 0 = nothing.
        number: number of the step, which the workers report with it; 0 = it is not asked for.
    """

    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    idle: bool = False
    others: int = 0
    number: int = 0


class End(NamedTuple):
    """The end of a job on the ranks that have reported.

    Attributes:
        ranks: number of ranks that have reported.
        pages: leading pages that succeeded on all these ranks.
        seconds: the longest time from submission to end on one rank; 0.0 = not measured.
    """

    ranks: int
    pages: int
    seconds: float = 0.0


@dataclass(slots=True)
class Report:
    """The report of one or more workers after a step.

    Attributes:
        ended: job → its end; it does not touch blocks any more.
        late: jobs whose request has stopped waiting, although they have not ended.
        step: number of the step; see :class:`Step`.
    """

    ended: dict[int, End] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    step: int = 0

    def __bool__(self) -> bool:
        return bool(self.ended or self.late or self.step)

    def end(self, job: int, pages: int, seconds: float = 0.0) -> None:
        """One rank's job has ended."""
        self._add({job: End(1, pages, seconds)}.items())

    def joined(self, other: "Report") -> "Report":
        """Combine the reports of two ranks, or of two groups of ranks, of one step."""
        both = Report(dict(self.ended), self.late | other.late, max(self.step, other.step))
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
