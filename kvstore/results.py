"""What lookups, puts, gets and restores answer."""

from collections.abc import Callable
from types import TracebackType
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt


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

    Attributes:
        arrays: uint8, one of ``page_bytes`` a page. After ``close`` they must not be looked at.
    """

    def __init__(self, arrays: list[npt.NDArray[np.uint8]], release: Callable[[], None]) -> None:
        """Made by :meth:`Space.get`."""
        self.arrays = arrays
        self._release: Callable[[], None] | None = release

    def __len__(self) -> int:
        return len(self.arrays)

    def close(self) -> None:
        """Give the lease back."""
        release, self._release = self._release, None
        self.arrays = []
        if release is not None:
            release()

    def __enter__(self) -> "PageViews":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
