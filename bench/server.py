"""A node in a second process, for benches to measure from this one."""

import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvstore.client.store import KVStore

START_WAIT_S: Final = 30.0
END_WAIT_S: Final = 10.0
POPULATE_WAIT_S: Final = 60.0
ANSWER_WAIT_S: Final = 10.0
"""Longest wait of a bench for one answer: a loaded machine is slow, not broken."""
EXTENT_BYTES_MAX: Final = 256 << 20
_PAUSE_S: Final = 0.01


class NodeError(RuntimeError):
    """The node did not do what the bench needs of it."""


@contextmanager
def running(
    pool_bytes: int, *, prefault: bool = True, more: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Run ``kvstore-server`` in a directory of its own until the block ends.

    Args:
        pool_bytes: capacity of its host tier; a whole number of 4 extents.
        prefault: whether it touches its memory before it is used.
        more: further settings.

    Returns:
        the address to connect to.
    """
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        path = Path(folder, "kvstore.sock")
        settings = {
            # Unlike any other: else the other's mapped memory would pass for an earlier boot's.
            "node.name": path.parent.name,
            "socket.path": path,
            "host.capacity_bytes": pool_bytes,
            "host.extent_bytes": min(pool_bytes // 4, EXTENT_BYTES_MAX),
            "host.prefault": str(prefault).lower(),
            "http.port": 0,
        }
        command = [sys.executable, "-m", "kvstore.server.daemon", "--log-level", "WARNING"]
        for key, value in (settings | dict(more or {})).items():
            command += ["--set", f"{key}={value}"]
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        try:
            _wait_ready(child)
            yield f"unix://{path}"
        finally:
            _end(child)


@contextmanager
def connected(address: str, name: str = "bench") -> Iterator[KVStore]:
    """A store on the node at ``address``.

    Raises:
        NodeError: it does not answer.
    """
    with KVStore.connect(address, name=name, timeout_s=ANSWER_WAIT_S) as store:
        if not store.connected:
            raise NodeError(f"nobody answers at {address}")
        yield store


def wait_populated(store: KVStore, pool_bytes: int) -> None:
    """Wait until the node has touched all its memory.

    Raises:
        NodeError: it takes too long.
    """
    deadline = time.monotonic() + POPULATE_WAIT_S
    while store.stats()["populated_bytes"] < pool_bytes:
        if time.monotonic() >= deadline:
            raise NodeError(f"the node's memory is not populated after {POPULATE_WAIT_S:g} s")
        time.sleep(_PAUSE_S)


def _wait_ready(child: subprocess.Popen[bytes]) -> None:
    assert child.stdout is not None, "it was started with a pipe"
    readable, _, _ = select.select([child.stdout], [], [], START_WAIT_S)
    line = child.stdout.readline() if readable else b""
    if b"ready" not in line:
        raise NodeError(f"kvstore-server did not get ready: {line.decode(errors='replace')!r}")


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ask it to end, insist after a while, and leave nothing of it."""
    child.terminate()
    try:
        child.wait(END_WAIT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    if child.stdout is not None:
        child.stdout.close()
