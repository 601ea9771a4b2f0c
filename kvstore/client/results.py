"""What lookups, puts, gets and restores answer."""

from collections.abc import Callable
from types import TracebackType
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.client import forks


class Hit(NamedTuple):
    """What a lookup found.

    Attributes:
        pages: length of the longest prefix that is READY on every shard asked for; 0 = a miss.
        pending: further pages that are being written now.
        tiers: tier name → pages of the hit in it.
        load_seconds: estimate of how long loading the hit takes, from what loads from memory
            and from disk took so far.
    """

    pages: int
    pending: int = 0
    tiers: dict[str, int] = {}  # noqa: RUF012
    load_seconds: float = 0.0


class PutResult(NamedTuple):
    """What became of the pages of a put."""

    stored: int
    existing: int = 0
    pending: int = 0
    refused: int = 0

    def plus(self, other: "PutResult") -> "PutResult":
        """What became of the pages of two puts."""
        return PutResult(*(a + b for a, b in zip(self, other, strict=True)))


MISS: Final = Hit(0)


class RestoreResult(NamedTuple):
    """How a restore ended.

    Attributes:
        pages: leading pages whose blocks now hold verified KV; the rest holds nothing valid.
        size_bytes: bytes of those pages.
        seconds: from the job's start to its end.
    """

    pages: int
    size_bytes: int = 0
    seconds: float = 0.0


class PageViews:
    """Read-only views of pages in the node's memory, under a lease; use it as a context manager.

    The bytes were verified when :meth:`Space.get` returned, and until ``close`` the node gives
    their memory to nobody else. It is shared all the same: a process of the same tenant that writes
    outside of its own slots can change what a view shows, and nobody would notice. Who needs bytes
    that are proved to be the page's copies them, with ``get(out=...)``.

    Views that are forgotten without ``close`` keep their pages for as long as this process lives.
    A forked child has none of its parent's: it cannot know when the parent closes them, so the
    memory is not mapped there. They are empty in the child, and an array that was taken out of
    them before is memory that is not there: a child that looks at it dies of SIGSEGV.

    Attributes:
        arrays: uint8, one of ``page_bytes`` a page. After ``close`` they must not be looked at.
    """

    def __init__(self, arrays: list[npt.NDArray[np.uint8]], release: Callable[[], None]) -> None:
        """Made by :meth:`Space.get`."""
        self.arrays = arrays
        self._release: Callable[[], None] | None = release
        if arrays:
            forks.register(self)

    def __len__(self) -> int:
        return len(self.arrays)

    def close(self) -> None:
        """Give the lease back."""
        release, self._release = self._release, None
        self.arrays = []
        if release is not None:
            release()

    def forked(self) -> None:
        """In a forked child: there are none."""
        self.arrays, self._release = [], None

    def __enter__(self) -> "PageViews":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
