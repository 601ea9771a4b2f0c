"""The output of the disk side: jobs for the SSD tier, effects for the page table. Pure."""

from itertools import count
from typing import Final

from kvstore.protocol.errors import KVStoreError
from kvstore.state.disk.jobs import (
    DiskCheck,
    DiskCopy,
    DiskEffect,
    DiskJob,
    DiskRead,
    DiskWrite,
    RecordOf,
)
from kvstore.state.tree.story import Story

TURN_PAGES: Final = 128
"""Pages of which one turn begins or ends jobs, settles writes and loads, or gives up records: the
sum of all these, which what is one run may exceed. Each takes five to ten microseconds."""
_RECORDED: Final = (DiskRead, DiskCheck, DiskCopy)
"""Jobs that are recorded in the story; a write is recorded when its first record starts."""


class Turn:
    """What the disk side has done in the present turn of the node's loop.

    Attributes:
        left: of :data:`TURN_PAGES`, what it may still do; below 0 = it has done more.
    """

    def __init__(self) -> None:
        self.left = TURN_PAGES

    def begin(self) -> None:
        """The next turn begins: it may do as much again."""
        self.left = TURN_PAGES

    @property
    def takes_more(self) -> bool:
        """Whether it takes more ended jobs: half of it is for those who waited for them."""
        return self.left > TURN_PAGES // 2


class DiskQueue:
    """All unfinished jobs of one node, and the effects on pages.

    Args:
        story: records the jobs of single pages.

    Attributes:
        pending: jobs to carry out, in order; the tier removes them from the list.
        number: gives the number of the next job.
        effects: to be applied, in order; the page table removes them from the list.
        turn: what of all this is done in one turn.
    """

    def __init__(self, story: Story) -> None:
        self.pending: Final[list[DiskJob]] = []
        self.effects: Final[list[DiskEffect]] = []
        self._story = story
        self.number: Final = count(1).__next__
        self.turn: Final = Turn()
        #: Job number → job, and whose page it is of; all and only those under way.
        self._under_way: dict[int, tuple[DiskJob, RecordOf | None]] = {}

    def submit(self, job: DiskJob, of: RecordOf | None = None) -> None:
        """Add a job; :meth:`end` is called when the tier has ended it.

        Args:
            job: the job.
            of: the page that it reads, writes or copies.
        """
        assert job.job not in self._under_way, "two jobs with one number"
        self._under_way[job.job] = job, of
        self.pending.append(job)
        self.turn.left -= 1
        if isinstance(job, _RECORDED):
            self._tell("begun", job, of)

    def submit_writes(self, jobs: list[DiskWrite], of: RecordOf) -> None:
        """Add writes of pages of one shard."""
        before = len(self._under_way)
        for job in jobs:
            self._under_way[job.job] = job, of
        assert len(self._under_way) == before + len(jobs), "two jobs with one number"
        self.pending.extend(jobs)
        self.turn.left -= len(jobs)

    def end(self, number: int, error: KVStoreError | None) -> tuple[DiskJob, RecordOf | None]:
        """The tier has ended a job; returns the job, and its page."""
        job, of = self._under_way.pop(number)
        self.turn.left -= 1
        if not isinstance(job, DiskWrite) and isinstance(job, _RECORDED):
            self._tell("ended" if error is None else error.code, job, of)
        return job, of

    def _tell(self, what: str, job: DiskRead | DiskCheck | DiskCopy, of: RecordOf | None) -> None:
        assert of is not None
        what = f"{type(job).__name__} {what}"
        self._story.tell_page(what, of.space.number, job.page.key, of.shard)
