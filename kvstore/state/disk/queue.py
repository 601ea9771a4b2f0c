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

_RECORDED: Final = (DiskRead, DiskCheck, DiskCopy)
"""Jobs that are recorded in the story; a write is recorded when its first record starts."""


class DiskQueue:
    """All unfinished jobs of one node, and the effects on pages.

    Args:
        story: records the jobs of single pages.

    Attributes:
        pending: jobs to carry out, in order; the tier removes them from the list.
        number: gives the number of the next job.
        effects: to be applied, in order; the page table removes them from the list.
    """

    def __init__(self, story: Story) -> None:
        self.pending: Final[list[DiskJob]] = []
        self.effects: Final[list[DiskEffect]] = []
        self._story = story
        self.number: Final = count(1).__next__
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
        if isinstance(job, _RECORDED):
            self._tell("begun", job, of)

    def submit_writes(self, jobs: list[DiskWrite], of: RecordOf) -> None:
        """Add writes of pages of one shard."""
        before = len(self._under_way)
        for job in jobs:
            self._under_way[job.job] = job, of
        assert len(self._under_way) == before + len(jobs), "two jobs with one number"
        self.pending.extend(jobs)

    def end(self, number: int, error: KVStoreError | None) -> tuple[DiskJob, RecordOf | None]:
        """The tier has ended a job; returns the job, and its page."""
        job, of = self._under_way.pop(number)
        if not isinstance(job, DiskWrite) and isinstance(job, _RECORDED):
            self._tell("ended" if error is None else error.code, job, of)
        return job, of

    def _tell(self, what: str, job: DiskRead | DiskCheck | DiskCopy, of: RecordOf | None) -> None:
        assert of is not None
        what = f"{type(job).__name__} {what}"
        self._story.tell_page(what, of.space.number, job.page.key, of.shard)
