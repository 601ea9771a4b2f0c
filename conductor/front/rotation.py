"""Begins files that only their user reads, and keeps older ones."""

import contextlib
import os
import stat
from pathlib import Path


def begin_file(path: Path, files_max: int) -> int:
    """Begin a new file with mode 0600; returns its descriptor.

    Args:
        path: of the file; the one that is there gets ``.1``, and older ones ``.2`` and so on.
        files_max: how many are kept, this one included.

    Raises:
        OSError: it cannot be created, or something else than a file is there.
    """
    if path.is_symlink():
        raise FileExistsError(0, "is a symbolic link")
    refuse_no_file(path)
    names = [path, *(Path(f"{path}.{n}") for n in range(1, files_max))]
    if path.exists():  # else the last time ended after this, and older ones would vanish
        for older, newer in zip(names[:0:-1], names[-2::-1], strict=True):
            with contextlib.suppress(FileNotFoundError):
                newer.replace(older)
    if files_max == 1:
        path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    return os.open(path, flags, stat.S_IRUSR | stat.S_IWUSR)


def refuse_no_file(path: Path) -> None:
    """Refuse the path of a device, a pipe or a folder: a write would replace it.

    Raises:
        OSError: the path exists and is not a regular file.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(0, "exists and is not a regular file")
