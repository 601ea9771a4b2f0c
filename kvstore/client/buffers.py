"""Where the memory that callers pass lies, checked before anything reads or writes it."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidArgument
from kvstore.page import PrefixKeys

Buffer = bytes | bytearray | memoryview | npt.NDArray[np.generic]
"""What holds the bytes of one page; any dtype."""


def addresses(
    buffers: Sequence[Buffer], size: int, *, writable: bool = False
) -> npt.NDArray[np.uint64]:
    """Where the buffers' bytes are.

    Raises:
        InvalidArgument: one has another size, is not contiguous, or may not be written.
    """
    found = np.empty(len(buffers), dtype=np.uint64)
    field, need = "pages", "C-contiguous"
    if writable:
        field, need = "out", "writable and C-contiguous"
    for index, buffer in enumerate(buffers):
        if isinstance(buffer, np.ndarray):
            array, contiguous = buffer, buffer.flags.c_contiguous
        else:
            view = memoryview(buffer)
            contiguous = view.c_contiguous
            array = np.frombuffer(view if contiguous else b"", dtype=np.uint8)
        if not contiguous or (writable and not array.flags.writeable):
            raise InvalidArgument(field, f"page {index} is not {need}")
        if array.nbytes != size:
            raise InvalidArgument(field, f"page {index} has {array.nbytes} bytes, not {size}")
        found[index] = array.__array_interface__["data"][0]  # twice as fast as array.ctypes
    return found


def same_length(keys: PrefixKeys, blocks: npt.ArrayLike, per_page: int) -> None:
    """Refuse blocks that are not those of the keys.

    Raises:
        InvalidArgument: more or fewer than ``per_page`` a key.
    """
    have = np.size(np.asarray(blocks))
    if have != len(keys) * per_page:
        raise InvalidArgument("blocks", f"{have} blocks for {len(keys)} keys of {per_page} each")
