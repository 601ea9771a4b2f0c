"""Memory for a pool that a transport's own process maps too."""

import mmap
import os

import numpy as np


class SharedMemory:
    """Zeroed host memory with a descriptor; a pool in it can be given to Mooncake.

    Args:
        size_bytes: at least 1.

    Raises:
        OSError: there is not enough memory, or no descriptor left.

    Attributes:
        buffer: the memory; it exists until the buffer is not used any more.
        address: its start address.
        size_bytes: its size.
        descriptor: of the memory; -1 after :meth:`close`.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.descriptor = os.memfd_create("kvstore:handoff-pool", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, size_bytes)
            self.buffer = mmap.mmap(self.descriptor, size_bytes)
        except OSError:
            self.close()
            raise
        self.address = int(np.frombuffer(self.buffer, dtype=np.uint8).ctypes.data)

    def close(self) -> None:
        """Close the descriptor, when no transport needs it any more; may be repeated."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
