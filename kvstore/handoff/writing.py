"""The interface of a transport that writes KV beside the link; decode does not see its writes.

Each manager has at most one. Messages and aux data always use the link, and so does every job that
the transport refuses.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.handoff.messages import LandingPlace


class BlockWrite(NamedTuple):
    """Blocks of one job to write to decode's pool, or to its staging memory.

    Attributes:
        number: of the job.
        endpoint: of decode's engine.
        here: address of each block in our pool, shape (n,), neighbours first.
        there: target address of each in the memory of decode's engine, shape (n,).
        block_bytes: of each.
    """

    number: int
    endpoint: str
    here: npt.NDArray[np.uint64]
    there: npt.NDArray[np.uint64]
    block_bytes: int


WriteEnded = Callable[[int, str, bool], None]
"""Gets a job's number; why its write failed, empty = all is at decode and can be read there; and
whether bytes may still arrive at decode. Nothing is read from our pool any more."""


EngineUp = Callable[[int, LandingPlace, range], None]
"""Gets the number of an engine, its addresses of all planes of the pool, and those of the staging
memory."""


class BlockWriter(Protocol):
    """Prefill's end of another transport; any thread may call it.

    Attributes:
        transport: its name, as decode names it.
        gather_memory: for heads that are gathered before they are written; it can read this.
    """

    transport: str
    gather_memory: npt.NDArray[np.uint8]

    def begin(self, ended: WriteEnded) -> None:
        """Report the end of each write from now on, once, from a separate thread."""

    def takes(self, write: BlockWrite) -> bool:
        """Whether it would carry this now; else the job goes over the link."""

    def submit(self, write: BlockWrite) -> None:
        """Start a write; returns at once, whatever decode does."""

    def close(self) -> None:
        """Abort all writes, report their ends, and stop everything that this has started."""


class LandingEngine(Protocol):
    """Decode's end of another transport: engines one after another; any thread may call it.

    Attributes:
        transport: its name.
        staged_address: where the memory for heads begins that are scattered when they have arrived.
    """

    transport: str
    staged_address: int

    def begin(self, up: EngineUp, ended: Callable[[int], None]) -> None:
        """Report the start and the certain end of each engine, with its number."""

    def end(self, number: int) -> None:
        """End an engine, if it still exists, and start another one; returns at once."""

    def close(self) -> None:
        """End the engine for good; nothing arrives after this."""
