"""Pages on their way from the node's memory to a device, verified as they are copied.

The node's memory is shared with other processes: what a device copied from there it would read
after it was digested. So pages are copied to pinned memory of our own, and verified in that pass;
the device copies from there, one half of it while the other is filled.
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
"""Of the memory: small enough to keep, large enough to keep a device busy."""


class Pages(NamedTuple):
    """Pages in host memory; see :func:`kvstore.mover.scatter`."""

    sources: mover.Addresses
    size: int
    digests: mover.Digests
    seeds: npt.NDArray[np.uint64]


class WayIn:
    """Memory of our own between the node's and the device's; one thread uses it at a time.

    Args:
        device: that copies from it.
        stream: on which; None on ``cpu``.
    """

    def __init__(self, device: torch.device, stream: Any) -> None:
        """Take no memory before there is something to copy."""
        self._device = device
        self._stream = stream
        self._using = threading.Lock()
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(
        self, pages: Pages, targets: list[torch.Tensor], progress: mover.Progress | None
    ) -> int:
        """Copy pages up to the first that does not verify; how many are there when it returns.

        Args:
            pages: where they are, and what they must be.
            targets: on the device, ``pages.size`` bytes each.
            progress: to cancel it.
        """
        with self._using, on_stream(self._stream):
            return self._copy(pages, targets, progress)

    def close(self) -> None:
        """Give the memory back; nothing is copied any more."""
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
    """What is queued inside goes to this stream; None: there is none."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)
