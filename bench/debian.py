"""Packages of Debian, unpacked outside of the clone: no root is needed, and nothing is started."""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

_FOLDERS: Final = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "lib/x86_64-linux-gnu")
_DOWNLOAD_S: Final = 300.0


def unpack(packages: tuple[str, ...], target: Path) -> None:
    """Download packages, and unpack them into a folder.

    Raises:
        OSError: there is no apt-get, or no dpkg.
        SubprocessError: they cannot be had.
    """
    sys.stderr.write(f"unpacking {', '.join(packages)} into {target}\n")
    with tempfile.TemporaryDirectory(prefix="kvstore-") as folder:
        command = ["apt-get", "--quiet", "--quiet", "download", *packages]
        subprocess.run(
            command, cwd=folder, check=True, timeout=_DOWNLOAD_S, stdout=subprocess.DEVNULL
        )
        for package in sorted(Path(folder).glob("*.deb")):
            subprocess.run(["dpkg", "-x", package, target], check=True)


def libraries(target: Path) -> list[str]:
    """The folders of libraries in what was unpacked."""
    return [str(target / one) for one in _FOLDERS if (target / one).is_dir()]
