"""A ``kvstore-server`` whose disk has a limited write speed.

``python -m kvstore.testing.paced BYTES_PER_S [options of kvstore-server]``
"""

import sys
import threading
from collections.abc import Sequence
from time import monotonic

from kvstore.server.daemon import main as serve
from kvstore.tier.disk import Buffer, OSDisk


class PacedDisk(OSDisk):
    """The machine's disk with a limited speed: writes complete one after another.

    Args:
        bytes_per_s: total write speed, above 0.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._never = threading.Event()
        self._lock = threading.Lock()
        #: When the writes so far will have ended; protected by the lock.
        self._free_s = 0.0

    def write(self, descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
        """See :class:`~kvstore.tier.disk.Disk`; returns when the limited speed allows it."""
        written = super().write(descriptor, buffers, offset)
        with self._lock:
            self._free_s = max(self._free_s, monotonic()) + written / self._bytes_per_s
            end_s = self._free_s
        self._never.wait(max(0.0, end_s - monotonic()))
        return written


def main(arguments: Sequence[str]) -> int:
    """Run the daemon; returns the process's exit status."""
    return serve(arguments[1:], PacedDisk(float(arguments[0])))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
