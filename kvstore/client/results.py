"""Results of lookups, puts, gets and restores."""

from collections.abc import Callable
from types import TracebackType
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.client import forks


class Hit(NamedTuple):
    """The result of a lookup.

    Attributes:
        pages: length of the longest prefix that is READY on every requested shard; 0 = a miss.
        pending: number of pages after ``pages`` that are being written now. In a cluster, also
            pages for which the node is still finding out whether other nodes have them.
        tiers: tier name (``gpu``, ``host``, ``ssd``) → number of pages of the hit in it.
        load_seconds: estimated time to load the hit, from the speed of earlier loads from memory
            and from disk.
        remote: number of pages after the hit that another node of the cluster has. A load fetches
            them first.
        remote_seconds: estimated time to fetch these pages, in addition to loading them from
            memory.
    """

    pages: int
    pending: int = 0
    tiers: dict[str, int] = {}  # noqa: RUF012
    load_seconds: float = 0.0
    remote: int = 0
    remote_seconds: float = 0.0


class PutResult(NamedTuple):
    """The result of a put, as numbers of pages.

    Attributes:
        stored: stored by this put.
        existing: already stored before.
        pending: being written by another put now.
        refused: not stored; a put that refuses pages raises ``CapacityError``.
    """

    stored: int
    existing: int = 0
    pending: int = 0
    refused: int = 0


MISS: Final = Hit(0, tiers={"host": 0})
"""The hit at a node that has none of the pages."""


class RestoreResult(NamedTuple):
    """The result of a restore.

    Attributes:
        pages: number of leading pages whose blocks now hold verified KV; the blocks of the other
            pages hold nothing valid.
        size_bytes: total size of these leading pages.
        seconds: time from the job's submission to its end.
    """

    pages: int
    size_bytes: int = 0
    seconds: float = 0.0


class PageViews:
    """Read-only views of pages in the node's memory, under a lease; use it as a context manager.

    :meth:`Space.get` makes it.

    The bytes were verified before :meth:`Space.get` returned, and the node does not reuse their
    memory until ``close``. But the memory is shared: a process of the same tenant that writes
    outside its own slots can change what a view shows, and this is not detected. If you need bytes
    that are verified to belong to the page, copy them with ``get(out=...)``.

    Views that are never closed keep their pages in memory for as long as this process lives. A
    forked child does not inherit them: the child cannot know when its parent closes them, so the
    memory is not mapped there. Its copy of this object is empty, and reading an array that was
    taken out before the fork ends the child with SIGSEGV.

    Attributes:
        arrays: one read-only array for each page, shape ``(page_bytes,)``, dtype uint8. The node
            owns the memory; do not read an array after ``close``.
    """

    def __init__(self, arrays: list[npt.NDArray[np.uint8]], release: Callable[[], None]) -> None:
        self.arrays = arrays
        self._release: Callable[[], None] | None = release
        if arrays:
            forks.register(self)

    def __len__(self) -> int:
        return len(self.arrays)

    def close(self) -> None:
        """Release the lease; the arrays must not be read afterwards. May be called twice."""
        release, self._release = self._release, None
        self.arrays = []
        if release is not None:
            release()

    def forked(self) -> None:
        """In a forked child: there are no views."""
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
