"""Keeps the log's segments: seals full ones, reclaims cold ones, deletes what is drained. Pure.

Reclaiming a segment: its cold pages leave the disk at once, leaves first; those still worth keeping
are copied to the open segment; when the last copy has ended and nobody reads the segment any more,
its file is deleted and the room is free.
"""

from collections import Counter
from collections.abc import Callable

from kvstore.errors import KVStoreError
from kvstore.state.diskjobs import DiskCopy, DiskDrop, DiskSeal, DiskJob
from kvstore.state.log import SegmentLog
from kvstore.state.tree import Node, is_live


class SegmentKeeper:
    """Upkeep of one log.

    Args:
        log: which record lies where.
        submit: hands a job to the tier; numbers it.
        lose: takes a page off the disk: ``lose(node, shard)``.
        counts: what is counted.
    """

    def __init__(
        self, log: SegmentLog, number: Callable[[], int], submit: Callable[[DiskJob], None],
        lose: Callable[[Node, int], None], counts: Counter[str],
    ) -> None:  # fmt: skip
        """Start with nothing under way."""
        self._log = log
        self._submit = submit
        self._lose = lose
        self._counts = counts

    def tend(self) -> None:
        """Stub."""

    def completed(self, job, error) -> None:
        """Stub."""
