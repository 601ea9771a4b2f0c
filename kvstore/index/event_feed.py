"""The interface for applying the events of one followed worker to an index."""

from collections.abc import Iterator
from typing import Protocol

from kvstore.index.blocks import Workspace


class EventFeed(Protocol):
    """Applies the events of a worker, for its follower.

    :class:`kvstore.index.feed.WorkerFeed` applies them to this process' table, and
    :class:`kvstore.cluster.announcing.PageAnnouncement` sends a node's own pages to Redis.
    """

    @property
    def workspace(self) -> Workspace:
        """The buffers for decoding events."""
        ...

    @property
    def published(self) -> float:
        """Publication time of the newest batch, seconds since the epoch."""
        ...

    @property
    def left_out(self) -> int:
        """Pages of the worker that were left out since :meth:`clear`."""
        ...

    @property
    def full(self) -> bool:
        """Whether no more is to be read at the moment."""
        ...

    def add(self, space: str, shard: str, medium: str, keys: bytes) -> None:
        """Add pages of a snapshot; see :meth:`kvstore.index.feed.WorkerFeed.add`."""
        ...

    def apply(self, payload: bytes) -> Iterator[None]:
        """Apply one batch in steps.

        Raises:
            UnreadableError: the payload cannot be read; some of its events may have been applied.
        """
        ...

    def clear(self) -> None:
        """The worker has no page, as far as is known."""
        ...

    def live(self, *, counts: bool) -> None:
        """Whether everything earlier was applied, so that its pages count."""
        ...
