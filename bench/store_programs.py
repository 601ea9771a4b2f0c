"""The servers of etcd and Redis: those on PATH, else Debian's, unpacked outside of the clone.

``python -m bench.store_programs [etcd] [redis-server]`` gets them if need be and prints for each
the command that starts it. Packages are only unpacked: no root is needed, and nothing of them is
started or changed. Unpacked programs find their libraries by ``LD_LIBRARY_PATH``.
"""

import argparse
import os
import shlex
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

    @property
    def command(self) -> str:
        """What a shell starts it with; its arguments follow."""
        given = [f"{name}={text}" for name, text in self.environment.items()]
        return shlex.join([*(["env", *given] if given else []), str(self.path)])


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
    """Get the programs that are asked for.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bench.store_programs",
        description="Print the command that starts each program: the one on PATH, else Debian's,"
        " which is unpacked below ~/.cache/kvstore first, with the LD_LIBRARY_PATH that it needs."
        " Nothing is started, and no root is needed.",
    )
    parser.add_argument(
        "program", nargs="*", metavar="PROGRAM", help="etcd or redis-server; default: both"
    )
    asked = parser.parse_args().program or list(_PACKAGES)
    if unknown := [one for one in asked if one not in _PACKAGES]:
        parser.error(f"{unknown[0]} is none of {', '.join(_PACKAGES)}")
    try:
        for program in asked:
            sys.stdout.write(f"{find(program).command}\n")
    except NoProgramError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
