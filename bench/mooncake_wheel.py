"""Mooncake's wheel and Debian's libibverbs1: the installed ones, else got outside of the clone.

``python -m bench.mooncake_wheel`` gets them if need be.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from bench import debian, environments

_LOCK: Final = environments.LOCKS / "mooncake.lock.txt"
_PACKAGES: Final = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")
_PROBE: Final = "import mooncake.engine"
_PROBE_S: Final = 60.0


class NoMooncakeError(RuntimeError):
    """Mooncake is neither there nor can it be had; the message says why."""


def environment() -> dict[str, str]:
    """The variables with which ``import mooncake.engine`` works; gets it when it is absent.

    Raises:
        NoMooncakeError: it is not installed, and cannot be had.
    """
    if _imports({}):
        return {}
    target = environments.folder("mooncake", _LOCK)
    try:
        with environments.making(target) as absent:
            if absent:
                sys.stderr.write(f"installing Mooncake into {target} (0.2 GiB)\n")
                command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
                subprocess.run(
                    [*command, "--target", target / "site", "-r", str(_LOCK)], check=True
                )
                debian.unpack(_PACKAGES, target)
    except (OSError, subprocess.SubprocessError) as error:
        raise NoMooncakeError(f"Mooncake cannot be had: {error}") from error
    found = {
        "PYTHONPATH": _joined(str(target / "site"), os.environ.get("PYTHONPATH", "")),
        "LD_LIBRARY_PATH": _joined(
            *debian.libraries(target), os.environ.get("LD_LIBRARY_PATH", "")
        ),
    }
    if not _imports(found):
        raise NoMooncakeError(f"Mooncake in {target} cannot be imported: python -c {_PROBE!r}")
    return found


def _joined(*paths: str) -> str:
    return os.pathsep.join(one for one in paths if one)


def _imports(variables: dict[str, str]) -> bool:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], env=os.environ | variables, timeout=_PROBE_S,
            cwd=Path(__file__).parent.parent, capture_output=True, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main() -> int:
    """Get it.

    Returns:
        Exit status.
    """
    try:
        environment()
    except NoMooncakeError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
