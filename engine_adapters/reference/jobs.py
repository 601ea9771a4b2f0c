"""Jobs in flight between an engine's pool and the store. Plain values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine_adapters.reference.request import Request
from kvstore.client.jobs import RestoreJob, StoreJob
from kvstore.client.results import PutResult, RestoreResult


@dataclass(slots=True)
class RestoreJobs:
    """A restore in flight; it holds references to ``blocks`` and ``tail_blocks``.

    Attributes:
        first_page: index of the first page of the request that it restores.
        pages: number of pages that it restores.
        remote: number of pages at the end of ``pages`` that are at other nodes.
        page_jobs: restore of the pages of each rank; empty = there are none. Fewer than ranks = the
            other restores were refused.
        tail_jobs: restore of the prompt's unfilled last page, of each rank.
        tail_tokens: tokens in this last page.
        deadline: when it is cancelled, monotonic seconds.
        number: number of this restore among all restores of the engine.
    """

    request: Request
    first_page: int
    pages: int
    remote: int
    page_jobs: list[RestoreJob]
    blocks: list[int]
    tail_jobs: list[RestoreJob]
    tail_blocks: list[int]
    tail_tokens: int
    deadline: float
    number: int
    cancelled: bool = False

    def jobs(self) -> list[RestoreJob]:
        """Those that were started."""
        return self.page_jobs + self.tail_jobs

    def cancel(self) -> None:
        """Ask them to stop early, once."""
        if not self.cancelled:
            self.cancelled = True
            for job in self.jobs():
                job.cancel()


def joint_result(results: Sequence[RestoreResult]) -> RestoreResult:
    """Of the restores of all ranks: a page is there when all have it."""
    pages = min(one.pages for one in results)
    size_bytes = sum(one.size_bytes for one in results)
    return RestoreResult(pages, size_bytes, max(one.seconds for one in results))


class PutJob(NamedTuple):
    """A put in flight; it holds references to ``blocks``, and has a job for each rank.

    Fewer jobs than ranks: the rest was refused.
    """

    request: Request
    jobs: list[StoreJob[PutResult]]
    blocks: list[int]
    pages: int
    began: float
    tail_key: str | None = None
