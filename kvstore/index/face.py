"""The interface of an index to nodes and the Conductor, wherever it runs. Pure."""

from collections.abc import Mapping
from typing import Final, NamedTuple, Protocol

from kvstore.index.control import Expect, FollowedWorker, IndexReport, Source
from kvstore.index.table import IndexReader

INDEX_FAULTS: Final = ("ended", "backlog")
"""Faults of an index: its process ended, or expected pages were left out."""


class PresentIndex(NamedTuple):
    """A readable snapshot of an index, for one decision.

    Attributes:
        table: the table to read; None while nothing is known.
        report: the state of the index that wrote this table; without a table, the last one known.
    """

    table: IndexReader | None
    report: IndexReport

    def worker(self, name: str) -> FollowedWorker | None:
        """The state of one worker; None if it is not followed."""
        return next((one for one in self.report.workers if one.worker == name), None)


class PrefixIndex(Protocol):
    """An index: in a process of its own, or in this one.

    Attributes:
        restarts: how often its process was started again.
    """

    restarts: int

    @property
    def fault_counts(self) -> Mapping[str, int]:
        """How often each of :data:`INDEX_FAULTS` has happened; none if it is left out."""
        ...

    def present(self) -> PresentIndex:
        """Its table and state now; with a separate process, the state is up to a second old.

        Two calls may return two different indexes: a caller that needs both uses one call.
        """
        ...

    def follow(self, source: Source) -> None:
        """Follow a source, in place of the worker's previous one."""
        ...

    def unfollow(self, worker: str) -> None:
        """Forget a worker, whether it was followed or only expected to have pages."""
        ...

    def expect(self, expected: Expect, table: IndexReader) -> None:
        """A worker will probably have some pages, whose chain values are of this table."""
        ...

    def unexpect(self, expected: Expect) -> None:
        """It will not have them; ignored if it was never expected, or no longer is."""
        ...

    async def run(self) -> None:
        """Follow until cancelled."""
        ...
