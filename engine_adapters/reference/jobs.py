"""Jobs in flight between an engine's pool and the store. Plain values."""

from dataclasses import dataclass
from typing import NamedTuple

from engine_adapters.reference.request import Request
from kvstore.client.jobs import RestoreJob, StoreJob
from kvstore.client.results import PutResult


@dataclass(slots=True)
class RestoreJobs:
    """A restore in flight; it holds references to ``blocks`` and ``tail_blocks``.

    Attributes:
        first_page: the first page of the request that it restores.
        pages: how many it restores.
        remote: how many of its ``pages``, the last ones, are at other nodes.
        job: the restore of the pages; None = there are none, or it was refused.
        tail_job: that of the prompt's unfilled last page.
        tail_tokens: tokens in that page.
        deadline: when it is cancelled, monotonic seconds.
    """

    request: Request
    first_page: int
    pages: int
    remote: int
    job: RestoreJob | None
    blocks: list[int]
    tail_job: RestoreJob | None
    tail_blocks: list[int]
    tail_tokens: int
    deadline: float
    cancelled: bool = False

    def jobs(self) -> list[RestoreJob]:
        """Those that were started."""
        return [job for job in (self.job, self.tail_job) if job is not None]

    def cancel(self) -> None:
        """Ask them to stop early, once."""
        if not self.cancelled:
            self.cancelled = True
            for job in self.jobs():
                job.cancel()


class PutJob(NamedTuple):
    """A put in flight; it holds references to ``blocks``."""

    request: Request
    job: StoreJob[PutResult]
    blocks: list[int]
    pages: int
    began: float
    tail_key: str | None = None
