"""Tests that are coroutines, and waiting in them."""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

WAIT_S = 25.0
"""See :data:`tests.conftest.WAIT_S`."""
PAUSE_S = 0.002


async def eventually(condition: Callable[[], object], what: str = "") -> None:
    """Give the loop to others until ``condition`` is true; fail after a while."""
    try:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.Event().wait(), PAUSE_S)
    except TimeoutError:
        pytest.fail(f"not within {WAIT_S} s: {what or condition}")


# The first loop of a process makes a pipe that stays: no test leaves it behind.
uvloop.new_event_loop().close()


def in_loop(case: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """An async test as a plain one, in a loop of its own, of the kind that the daemon has."""

    @functools.wraps(case)
    def run(*args: Any, **kwargs: Any) -> None:
        uvloop.run(case(*args, **kwargs))

    return run
