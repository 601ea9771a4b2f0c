"""Two network namespaces with a link between them that can be cut."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.conftest import wait_for

ADDRESSES = ("10.213.0.1", "10.213.0.2")
_IS_ROOT = os.geteuid() == 0
_NEW = ["unshare", "--net"] if _IS_ROOT else ["unshare", "--user", "--map-root-user", "--net"]
_ENTER = ["--net"] if _IS_ROOT else ["--user", "--preserve-credentials", "--net"]
_END_S = 10.0


class CutLink:
    """A veth pair of two namespaces, side 0 and side 1."""

    def __init__(self, holders: tuple[int, int]) -> None:
        """Join the namespaces of two processes."""
        self._holders = holders
        self._ip(0, "link", "add", "link0", "type", "veth", "peer", "name", "link0",
                 "netns", str(holders[1]))  # fmt: skip
        for side, address in enumerate(ADDRESSES):
            self._ip(side, "link", "set", "lo", "up")
            self._ip(side, "address", "add", f"{address}/24", "dev", "link0")
            self._ip(side, "link", "set", "link0", "up")

    def program(self, side: int, words: Sequence[str]) -> list[str]:
        """The command that runs another one at a side."""
        return ["nsenter", "--target", str(self._holders[side]), *_ENTER, *words]

    def cut(self) -> None:
        """Nothing arrives any more, and nobody is told."""
        self._ip(0, "link", "set", "link0", "down")

    def heal(self) -> None:
        """Everything arrives again."""
        self._ip(0, "link", "set", "link0", "up")

    def _ip(self, side: int, *words: str) -> None:
        subprocess.run(
            self.program(side, ["ip", *words]), check=True, capture_output=True, text=True,
            timeout=_END_S,
        )  # fmt: skip


@contextmanager
def cut_link() -> Iterator[CutLink]:
    """Two namespaces; skips the test where they are not permitted, and fails it in CI."""
    with ExitStack() as undo:
        try:
            holders = _hold(undo, _NEW)
            enter = [] if _IS_ROOT else ["nsenter", "--target", str(holders), *_ENTER]
            other = _hold(undo, [*enter, "unshare", "--net"])
            made = CutLink((holders, other))
        except (OSError, subprocess.CalledProcessError) as error:
            why = f"no network namespaces with a veth pair: {getattr(error, 'stderr', '') or error}"
            if "CI" in os.environ:
                pytest.fail(why)
            pytest.skip(why)
        yield made


def _hold(undo: ExitStack, command: list[str]) -> int:
    """A process in a new namespace; it ends with the block."""
    process = subprocess.Popen(
        [*command, "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stderr is not None
    undo.callback(process.wait, _END_S)
    undo.callback(process.stderr.close)
    undo.callback(process.stdin.close)
    is_inside = wait_for(
        lambda: process.poll() is not None or _namespace(process.pid) != _namespace(os.getpid()),
        _END_S,
    )
    if process.poll() is not None or not is_inside:
        process.kill()
        raise OSError(process.stderr.read().strip() or f"{command} did not come to its end")
    return process.pid


def _namespace(pid: int) -> Path:
    return Path(f"/proc/{pid}/ns/net").readlink()
