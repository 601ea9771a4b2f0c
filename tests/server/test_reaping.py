"""Goal: an admin process that cannot be waited for does not end the node."""

import asyncio
import subprocess

import pytest

from kvstore.server import http
from kvstore.server.http import HttpServer


class Stuck:
    """A child that the kernel holds, such as in a read of a dead disk."""

    def __init__(self) -> None:
        self.kills = 0

    def wait(self, timeout: float) -> int:
        raise subprocess.TimeoutExpired("admin", timeout)

    def kill(self) -> None:
        self.kills += 1

    def poll(self) -> None:
        return None


@pytest.mark.parametrize("threads", [True, False])
def test_a_child_that_does_not_end_is_killed_and_left(threads, monkeypatch):
    async def no_thread(_do: object) -> None:
        raise RuntimeError("can't start new thread")

    server = object.__new__(HttpServer)
    server._child = child = Stuck()  # type: ignore[assignment]
    if not threads:
        monkeypatch.setattr(asyncio, "to_thread", no_thread)

    assert asyncio.run(server._reaped()) is None
    assert child.kills == 1
    assert server._child is None
    assert asyncio.run(server._reaped()) is None, "there is no child now"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (None, "none"), (3, "exit status 3"), (-9, "killed by SIGKILL"),
        (-40, "killed by signal 40"),
    ],
)  # fmt: skip
def test_the_log_says_how_a_child_has_ended(status, said):
    assert http._status(status) == said
