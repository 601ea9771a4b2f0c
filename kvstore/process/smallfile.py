"""Reads small text files that a setting names, such as a token's, within a limit.

A path may be wrong. A device never ends, a pipe may never begin: neither must hold a start, or a
request, or fill the memory.
"""

import os
import stat
from pathlib import Path
from typing import Final

TOKEN_FILE_BYTES_MAX: Final = 4_096


def read_small(path: Path, bytes_max: int = TOKEN_FILE_BYTES_MAX) -> bytes:
    """The content of a regular file, or of one that a symbolic link leads to.

    Args:
        path: of the file.
        bytes_max: its largest size.

    Raises:
        OSError: it cannot be read, is not a regular file, or is larger.
    """
    # Without O_NONBLOCK a pipe would be opened when somebody writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is not a regular file")
        file = os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise
    with file:
        found = file.read(bytes_max + 1)
    if len(found) > bytes_max:
        raise OSError(f"it has more than {bytes_max:,} bytes")
    return found


def read_token(path: Path) -> str:
    """The text of a file with a token, without white space at both ends.

    Raises:
        OSError: see :func:`read_small`.
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_small(path).decode().strip()
