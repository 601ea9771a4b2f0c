"""How many of the engine's blocks loads and stores hold, and how many they may hold. Pure."""

from typing import Final

from kvstore.engine.requests import Setup
from kvstore.engine.states import BlockJob

STORES_MAX: Final = 64
STORES_SHARE_MAX: Final = 0.25
"""Maximum fraction of the engine's blocks that stores hold; further pages are stored later."""
LOADS_SHARE_MAX: Final = 0.75
"""If loads hold this fraction of the engine's blocks, no further one starts: even if none of them
ever ends, the engine can compute with the rest."""
LATE_SHARE_MAX: Final = 0.25
"""The same for loads whose requests have stopped waiting: their blocks are useless."""


class JobBlocks:
    """The blocks that jobs hold until they end.

    Args:
        blocks: number of the engine's blocks.
    """

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._all = self._of_loads = self._of_late = 0

    def pages_for_stores(self, jobs: int, setup: Setup) -> int:
        """Maximum number of pages for a store now; blocks that loads hold count, too.

        Args:
            jobs: number of jobs in flight.
            setup: of the engine.
        """
        if jobs >= STORES_MAX:
            return 0
        each = sum(setup.page_tokens // group.block_tokens for group in setup.groups)
        return max(0, max(1, int(self._blocks * STORES_SHARE_MAX)) - self._all) // each

    @property
    def too_many_for_loads(self) -> bool:
        """Whether loads hold so many blocks that no further one may start."""
        late = self._of_late >= self._blocks * LATE_SHARE_MAX
        return late or self._of_loads >= self._blocks * LOADS_SHARE_MAX

    def taken(self, job: BlockJob) -> None:
        """A job holds its blocks from now on."""
        self._all += len(job.held)
        self._of_loads += len(job.held) * job.is_load

    def late(self, job: BlockJob) -> None:
        """The request of a load has stopped waiting; repeated calls change nothing."""
        self._of_late += len(job.held) * (not job.late)
        job.late = True

    def released(self, job: BlockJob) -> None:
        """A job no longer holds its blocks."""
        self._all -= len(job.held)
        self._of_loads -= len(job.held) * job.is_load
        self._of_late -= len(job.held) * job.late
