"""The servers of etcd and Redis: those on PATH, else Debian's, unpacked outside of the clone.

``python -m bench.store_programs`` gets them if need be and prints their paths. Packages are only
unpacked: no root is needed, and nothing of them is started or changed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from bench import environments

_PACKAGES: Final = {
    "etcd": ("etcd-server",),
    "redis-server": (
        "redis-server", "redis-tools", "libatomic1", "libjemalloc2", "liblzf1", "libssl3",
        "libsystemd0",
    ),
}  # fmt: skip
_FOLDERS: Final = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "lib/x86_64-linux-gnu")
_DOWNLOAD_S: Final = 300.0


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
                _unpack(_PACKAGES[name], target)
    except (OSError, subprocess.SubprocessError) as error:
        raise NoProgramError(
            f"{name} is not installed, and Debian's cannot be had: {error}"
        ) from error
    folders = [str(target / one) for one in _FOLDERS if (target / one).is_dir()]
    return Program(target / "usr/bin" / name, {"LD_LIBRARY_PATH": os.pathsep.join(folders)})


def _unpack(packages: tuple[str, ...], target: Path) -> None:
    """Download packages, and unpack them into a folder."""
    sys.stderr.write(f"unpacking {', '.join(packages)} into {target}\n")
    with tempfile.TemporaryDirectory(prefix="kvstore-") as folder:
        command = ["apt-get", "--quiet", "--quiet", "download", *packages]
        subprocess.run(
            command, cwd=folder, check=True, timeout=_DOWNLOAD_S, stdout=subprocess.DEVNULL
        )
        for package in sorted(Path(folder).glob("*.deb")):
            subprocess.run(["dpkg", "-x", package, target], check=True)


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
