"""The servers of etcd and Redis: those on PATH, else Debian's, unpacked outside of the clone.

``python -m bench.store_programs`` gets them if need be and prints their paths. Packages are only
unpacked: no root is needed, and nothing of them is started or changed.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from bench import debian, environments

_PACKAGES: Final = {
    "etcd": ("etcd-server",),
    "redis-server": (
        "redis-server", "redis-tools", "libatomic1", "libjemalloc2", "liblzf1", "libssl3",
        "libsystemd0",
    ),
}  # fmt: skip


class Program(NamedTuple):
    """A program that can be started.

    Attributes:
        path: of its file.
        environment: variables that it needs.
    """

    path: Path
    environment: Mapping[str, str]


class NoProgramError(RuntimeError):
    """A program is neither there nor can it be had; the message says why."""


def find(name: str) -> Program:
    """A program; gets it when it is absent (seconds).

    Args:
        name: ``etcd`` or ``redis-server``.

    Raises:
        NoProgramError: it is not on PATH, and its packages cannot be had.
    """
    on_path = shutil.which(name)
    if on_path is not None:
        return Program(Path(on_path), {})
    target = environments.folder(f"{name}-debian")
    try:
        with environments.making(target) as absent:
            if absent:
                debian.unpack(_PACKAGES[name], target)
    except (OSError, subprocess.SubprocessError) as error:
        raise NoProgramError(
            f"{name} is not installed, and Debian's cannot be had: {error}"
        ) from error
    folders = os.pathsep.join(debian.libraries(target))
    return Program(target / "usr/bin" / name, {"LD_LIBRARY_PATH": folders})


def main() -> int:
    """Get both.

    Returns:
        Exit status.
    """
    try:
        for program in _PACKAGES:
            sys.stdout.write(f"{find(program).path}\n")
    except NoProgramError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
