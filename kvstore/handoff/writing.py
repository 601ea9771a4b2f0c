"""The interface of a transport that writes KV beside the link; decode does not see its writes.

The managers have one each at most. Messages and aux data go over the link in any case, and so does
every job that the transport does not take.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.handoff.messages import LandingPlace


class BlockWrite(NamedTuple):
    """Blocks of one job to write to decode's pool, or to its memory for what is staged.

    Attributes:
        number: of the job.
        endpoint: of decode's engine.
        here: address of each block in our pool, shape (n,), neighbours first.
        there: where each belongs in the memory of decode's engine, shape (n,).
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
"""Gets the number of an engine, where it has all planes of the pool, and the addresses there of the
memory for what is staged."""


class BlockWriter(Protocol):
    """Prefill's end of another transport; any thread may call it.

    Attributes:
        transport: its name, as decode names it.
        gather_memory: for heads that are gathered before they are written; it can read this.
    """

    transport: str
    gather_memory: npt.NDArray[np.uint8]

    def begin(self, ended: WriteEnded) -> None:
        """Tell the end of each write from now on, each once, from a thread of its own."""

    def takes(self, write: BlockWrite) -> bool:
        """Whether it would carry this now; else the job goes over the link."""

    def submit(self, write: BlockWrite) -> None:
        """Begin a write; returns at once, whatever decode does."""

    def close(self) -> None:
        """Break off all writes, tell their ends, and end all that this began."""


class LandingEngine(Protocol):
    """Decode's end of another transport: engines one after another; any thread may call it.

    Attributes:
        transport: its name.
        staged_address: where the memory for heads begins that are scattered when they have arrived.
    """

    transport: str
    staged_address: int

    def begin(self, up: EngineUp, ended: Callable[[int], None]) -> None:
        """Tell the beginning and the certain end of each engine, with its number."""

    def end(self, number: int) -> None:
        """End an engine, if it is still there, and begin another one; returns at once."""

    def close(self) -> None:
        """End the engine for good; nothing arrives after this."""
