"""Environments of other programs, made from a lock when they are absent, outside of the clone.

A folder is named by the hash of its locks, so a new lock is a new environment and an old one is
never changed.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

LOCKS: Final = Path(__file__).resolve().parent.parent / "requirements"
_DYNAMO: Final = LOCKS / "dynamo.lock.txt"
_READY: Final = ".ready"


def folder(name: str, *locks: Path) -> Path:
    """Where the environment ``name`` of these locks is, or will be."""
    digest = hashlib.sha256(b"".join(lock.read_bytes() for lock in locks)).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "kvstore" / f"{name}-{digest}"


@contextmanager
def making(target: Path) -> Iterator[bool]:
    """One process at a time makes ``target``; yields whether it is absent, and then empty."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        absent = not (target / _READY).exists()
        if absent:
            shutil.rmtree(target, ignore_errors=True)
        yield absent
        if absent:
            (target / _READY).touch()


def dynamo() -> Path:
    """The interpreter of Dynamo's environment; makes it when it is absent (half a minute).

    Raises:
        CalledProcessError: it cannot be made; pip has said why.
    """
    target = folder("dynamo", _DYNAMO)
    python = target / "bin" / "python"
    with making(target) as absent:
        if absent:
            sys.stderr.write(f"installing Dynamo into {target} (0.4 GiB)\n")
            subprocess.run([sys.executable, "-m", "venv", target], check=True)
            # Without dependencies: the lock has what its indexer needs, and all would be too much.
            command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps"]
            subprocess.run([*command, "-r", str(_DYNAMO)], check=True)
    return python
