"""Run a module of this clone with the compiled core: its tests, its bench.

``python -m tests.compiled [MODULE [ARGUMENTS]]``: without a module the tests of the state and the
node, as ``make test-compiled``. The wheel that ``make wheel`` makes is built from a copy of the
sources and unpacked outside of the clone, in a folder named by their hash: it is built again only
when they have changed. The module runs in a folder that has the wheel's ``kvstore`` beside all else
of the clone; child processes find the same one.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
SOURCES: Final = ("kvstore", "setup.py", "pyproject.toml", "requirements", "README.md", "LICENSE")
"""What the wheel's ``kvstore`` is made of; the other packages are not looked at."""
PACKAGES: Final = ("conductor", "engine_adapters")
BESIDE: Final = ("tests", "bench", "docs", "deploy", "examples", "Makefile", *PACKAGES)
TESTS: Final = (
    "pytest", "-p", "no:cacheprovider", "-n", "auto", "--maxprocesses", "4",
    "-m", "not soak and not vllm", "tests/state", "tests/node",
)  # fmt: skip
KEPT: Final = 8
"""States of the sources whose core is kept, those that were used last: 10 MiB each."""


def main(arguments: Sequence[str]) -> int:
    """Run the module; returns its exit status."""
    core = built()
    with tempfile.TemporaryDirectory(prefix="kvstore-compiled-") as name:
        folder = Path(name)
        (folder / "kvstore").symlink_to(core / "kvstore")
        for one in {*SOURCES, *BESIDE} - {"kvstore"}:
            (folder / one).symlink_to(ROOT / one)
        environment = {**os.environ, "PYTHONPATH": name, "TESTED_CORE": "compiled"}
        command = [sys.executable, "-m", *arguments]
        return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


def built() -> Path:
    """The folder with the wheel of these sources, unpacked; builds it when there is none.

    Raises:
        CalledProcessError: it cannot be built; pip has said why.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstore"
    target = cache / f"core-{_digest()}"
    if target.exists():
        os.utime(target)
        return target
    for old in sorted(cache.glob("core-*"), key=lambda path: path.stat().st_mtime)[: 1 - KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    sys.stderr.write(f"compiling the core into {target} (about two minutes)\n")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="making-", dir=cache) as name:
        source, dist, unpacked = (Path(name, one) for one in ("source", "dist", "core"))
        _copy(source)
        environment = {**os.environ, "KVSTORE_COMPILE": "1"}
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation"]
        command += ["--no-deps", "--wheel-dir", str(dist), str(source)]
        subprocess.run(command, env=environment, check=True)
        (wheel,) = dist.iterdir()
        zipfile.ZipFile(wheel).extractall(unpacked)
        if not target.exists():  # else another process was as fast
            unpacked.rename(target)
    return target


def _digest() -> str:
    """Names the sources, and the Python that they are compiled for."""
    found = hashlib.sha256(platform.python_version().encode())
    for path in sorted(_files()):
        found.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]


def _files() -> list[Path]:
    tops = [ROOT / one for one in SOURCES]
    below = [path for top in tops if top.is_dir() for path in top.rglob("*") if path.is_file()]
    return [
        path
        for path in [*below, *(top for top in tops if top.is_file())]
        if path.suffix not in (".pyc", ".so")
    ]


def _copy(target: Path) -> None:
    """The tree as setuptools wants it, with nothing that was built in it."""
    left_out = shutil.ignore_patterns("__pycache__", "*.so")
    for one in (*SOURCES, *PACKAGES):
        if (ROOT / one).is_dir():
            shutil.copytree(ROOT / one, target / one, ignore=left_out)
        else:
            shutil.copy(ROOT / one, target / one)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or TESTS))
