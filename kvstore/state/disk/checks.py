"""Reads records again: whether they are intact, and which tokens they contain. Pure.

Loads have priority: few records are read at a time, and only one while a request waits for a page.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from kvstore.protocol.errors import KVStoreError, PageCorrupt
from kvstore.protocol.page import PrefixKey
from kvstore.state.disk.jobs import DiskCheck, DiskTokens, RecordOf, page_record
from kvstore.state.disk.log import SegmentLog
from kvstore.state.disk.queue import DiskQueue
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.places import HEADER_BYTES
from kvstore.state.tree.prefix_tree import PrefixTree

CHECKS_MAX: Final = 8
"""Maximum records that are read again at a time; one while anything is loaded."""
CHECK_BYTES_MAX: Final = 16 << 20
"""No further read starts while this many bytes are being read: they stay in memory until
compared."""


@dataclass(slots=True, eq=False)
class CheckRun:
    """Pages to read again.

    Attributes:
        waiting: space, shard and key of the pages that are left.
        tokens_only: read only the tokens in the records, not the pages.
        tokens: (space number, key) → tokens of the page, as far as a run of ``tokens_only`` found
            them.
        under_way: number of pages being read.
        checked: pages that were read and compared.
        corrupt: pages that differ from what was written; quarantined.
        unreadable: pages that the disk failed to read; they stay, and the next load decides.
        skipped: pages that were no longer on disk, or moved, before their read ended; or whose
            tokens were found in the record of another shard.
    """

    waiting: deque[tuple[PrefixTree, int, PrefixKey]]
    tokens_only: bool = False
    tokens: dict[tuple[int, PrefixKey], bytes] = field(default_factory=dict)
    under_way: int = 0
    checked: int = 0
    corrupt: int = 0
    unreadable: int = 0
    skipped: int = 0

    @property
    def finished(self) -> bool:
        """Whether no page waits or is being read."""
        return not self.waiting and not self.under_way

    @property
    def ended(self) -> int:
        """Number of finished pages."""
        return self.checked + self.unreadable + self.skipped

    def cancel(self) -> None:
        """Start no further reads."""
        self.waiting.clear()


class DiskChecks:
    """All runs of one node, which take turns.

    Args:
        log: the places of records.
        queue: gets jobs for the tier; :meth:`completed` gets their ends.
        counts: counters.

    Attributes:
        runs: runs with waiting pages, now or a moment ago.
    """

    def __init__(self, log: SegmentLog, queue: DiskQueue, counts: dict[str, int]) -> None:
        self._log = log
        self._queue = queue
        self._counts = counts
        self.runs: deque[CheckRun] = deque()
        #: Job number → whose it is; all and only those under way.
        self._jobs: dict[int, CheckRun] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def begin(self, run: CheckRun, loads: int) -> CheckRun:
        """Add a run, and start its first reads, as :meth:`go_on` does; the run."""
        assert not run.under_way
        assert not run.ended
        self.runs.append(run)
        self.go_on(loads)
        return run

    def go_on(self, loads: int) -> None:
        """Start as many reads as are allowed while ``loads`` loads are in progress."""
        most = 1 if loads else CHECKS_MAX
        while self.runs and len(self._jobs) < most and self._bytes < CHECK_BYTES_MAX:
            run = self.runs.popleft()
            if run.waiting:
                self._begin(run, *run.waiting.popleft())
                self.runs.append(run)

    def _begin(self, run: CheckRun, space: PrefixTree, shard: int, key: PrefixKey) -> None:
        node = space.index.get(key)
        if node is None or not node.on_disk >> shard & 1 or (space.number, key) in run.tokens:
            run.skipped += 1
            return
        kind, position = DiskTokens if run.tokens_only else DiskCheck, node.position(key)
        place = node.place_at(shard, position)
        job = kind(self._queue.number(), place, page_record(node, shard, position))
        self._log.pin_segment(place.segment)
        self._jobs[job.job] = run
        assert len(self._jobs) <= CHECKS_MAX
        self._bytes += _size(job)
        run.under_way += 1
        self._queue.submit(job, RecordOf(space, shard))

    def completed(
        self, job: DiskCheck | DiskTokens, of: RecordOf, error: KVStoreError | None, tokens: bytes
    ) -> PrefixNode | None:
        """A page of ``of`` was read; ``tokens``: the tokens in its record.

        Returns:
            the page, as a node of its own, if its record differs from what was written.
        """
        page, run = job.page, self._jobs.pop(job.job)
        node = of.space.index.get(page.key)
        self._bytes -= _size(job)
        assert self._bytes >= 0
        self._log.unpin_segment(job.place.segment)
        run.under_way -= 1
        assert run.under_way >= 0
        if node is None or not _is_at(node, of.shard, job):
            run.skipped += 1
        elif error is None or isinstance(error, PageCorrupt):
            run.checked += 1
            self._counts["disk_checked_records"] += not run.tokens_only
            if run.tokens_only and len(tokens) == node.space.token_bytes:
                run.tokens[of.space.number, page.key] = tokens
            if error is not None:
                run.corrupt += 1
                self._counts["disk_corrupt_records"] += 1
                return of.space.exact(node, node.position(page.key), 1)
        else:
            run.unreadable += 1
        return None


def _is_at(node: PrefixNode, shard: int, job: DiskCheck | DiskTokens) -> bool:
    """Whether the page of a job, one of the node's, still has that record."""
    position = node.position(job.page.key)
    if not node.on_disk >> shard & 1 or node.place_at(shard, position) != job.place:
        return False
    return node.digest_at(shard, position) == job.page.digest


def _size(job: DiskCheck | DiskTokens) -> int:
    return HEADER_BYTES if isinstance(job, DiskTokens) else job.page.length


def names(pages: Iterable[tuple[PrefixNode, int]]) -> deque[tuple[PrefixTree, int, PrefixKey]]:
    """Space, shard and key of all pages of some nodes."""
    return deque((node.space, shard, key) for node, shard in pages for key in node.key_list())
