"""What a process has open; it may open and close things meanwhile."""

from collections.abc import Iterator
from pathlib import Path


def open_files(pid: int) -> Iterator[tuple[Path, str]]:
    """The entry of each of its descriptors in ``/proc``, and what that is of."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            link = str(entry.readlink())
        except FileNotFoundError:  # closed meanwhile
            continue
        yield entry, link
