"""Copies pages from the node's memory to a device, and verifies them during the copy.

The node's memory is shared with other processes, so it could change between a digest and the
device's copy. Therefore pages are copied to private pinned memory, and verified during that copy;
the device then copies from there. Of two halves one is filled while the device reads the other.
"""

import logging
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvstore import mover

log = logging.getLogger(__name__)

HALF_BYTES: Final = 16 << 20
"""Size of each half: small enough to keep, large enough to keep a device busy."""


class Pages(NamedTuple):
    """Pages in host memory; see :func:`kvstore.mover.scatter`."""

    sources: mover.Addresses
    size: int
    digests: mover.Digests
    seeds: npt.NDArray[np.uint64]


class WayIn:
    """Private memory between the node's memory and the device; used by one thread at a time.

    The first copy allocates it.

    Args:
        device: the device.
        stream: its stream; None on ``cpu``.
    """

    def __init__(self, device: torch.device, stream: Any) -> None:
        self._device = device
        self._stream = stream
        self._using = threading.Lock()
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(
        self, pages: Pages, targets: list[torch.Tensor], progress: mover.Progress | None
    ) -> int:
        """Copy pages up to the first that fails verification; returns how many are on the device.

        Args:
            pages: the pages, with their expected digests.
            targets: ``pages.size`` bytes each, on the device.
            progress: for cancellation.
        """
        with self._using, on_stream(self._stream):
            return self._copy(pages, targets, progress)

    def close(self) -> None:
        """Free the memory; nothing may be copied afterwards."""
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _copy(
        self, pages: Pages, targets: list[torch.Tensor], progress: mover.Progress | None
    ) -> int:
        size, count, good = pages.size, len(targets), 0
        at_once = max(1, HALF_BYTES // size)
        halves = self._halves(at_once * size)
        read: list[Any] = [None, None]
        for turn, start in enumerate(range(0, count, at_once)):
            part, half = slice(start, min(start + at_once, count)), halves[turn % 2]
            if read[turn % 2] is not None:
                read[turn % 2].synchronize()
            there = np.arange(part.stop - start, dtype=np.uint64) * np.uint64(size)
            ok = mover.scatter(
                pages.sources[part], size, pages.digests[part], pages.seeds[part],
                mover.Pieces.contiguous(there + np.uint64(half.data_ptr()), size), progress,
            )  # fmt: skip
            verified = len(ok) if ok.all() else int(np.argmin(ok))
            for index in range(verified):
                staged = half[index * size : (index + 1) * size]
                targets[start + index].copy_(staged, non_blocking=True)
            if self._stream is not None:
                read[turn % 2] = self._stream.record_event()
            good += verified
            if verified < len(ok):
                break
        if self._stream is not None:
            self._stream.synchronize()
        return good

    def _halves(self, size: int) -> list[torch.Tensor]:
        if len(self._memory) < 2 * size:
            self._memory = self._new(2 * size)
        assert len(self._memory) >= 2 * size
        return [self._memory[:size], self._memory[size : 2 * size]]

    def _new(self, size: int) -> torch.Tensor:
        if self._device.type != "cpu":
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                log.warning(
                    "%d bytes cannot be pinned (%s): copies to the device are slower; check"
                    " `ulimit -l` and free memory", size, error,
                )  # fmt: skip
        return torch.empty(size, dtype=torch.uint8)


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """A context that queues work on this stream; None = no stream."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)
