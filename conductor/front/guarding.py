"""Lets the Conductor's background work go on after a bug in one turn of it, counted and logged.

Failures that are expected are caught where they happen. What is caught here is none of these: it
would end the service, or a request that has nothing to do with it. An assertion that failed is not
caught: the state cannot be trusted then, and the Conductor stops.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

from kvstore.process.faults import SILENCE_S, Faults

BACKGROUND: Final = "background"
"""The cause by which they are counted."""
AGAIN_S: Final = 1.0
"""Seconds until work that has failed as a whole is begun again."""

_log = logging.getLogger(__name__)


class Guard:
    """Keeps failures of background work from the rest.

    Args:
        faults: counts them, as :data:`BACKGROUND`.
    """

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._logged: dict[str, float] = {}  # what → when

    @contextmanager
    def turn(self, what: str) -> Iterator[None]:
        """A context that ends early, and quietly for its caller, at a bug.

        Args:
            what: one of a few fixed words, for the log.
        """
        try:
            yield
        except AssertionError:
            raise
        except Exception as error:
            self._note(what, error)

    async def keep(self, what: str, work: Callable[[], Awaitable[None]]) -> None:
        """Do some work until it has ended or is cancelled; begin it again after a bug.

        Args:
            what: as of :meth:`turn`.
            work: can be begun again.
        """
        while True:
            failed = False
            try:
                await work()
            except* AssertionError:
                raise
            except* Exception as errors:
                failed = True
                self._note(what, errors)
            if not failed:
                return
            await asyncio.sleep(AGAIN_S)

    def _note(self, what: str, error: Exception) -> None:
        self._faults.count(BACKGROUND)
        now = time.monotonic()
        if now - self._logged.get(what, -SILENCE_S) >= SILENCE_S:
            self._logged[what] = now
            _log.error("bug in the Conductor, which continues: %s", what, exc_info=error)
