"""Keeps Python's cyclic garbage collector out of a loop that many processes wait for.

A node keeps millions of objects, and nothing of what it makes ends in a cycle: objects go when
nobody refers to them. Looking for cycles among all of them would stop its loop for seconds. So only
objects that were made a moment ago are looked at; what asyncio leaves behind when a connection
breaks is among them.
"""

import gc
from collections.abc import Callable
from typing import Final

YOUNG: Final = 1_000
"""Objects allocated between two collections of generation 0."""
YOUNG_ROUNDS: Final = 4
"""Collections of generation 0 between two of generation 1, which take some milliseconds."""
NEVER: Final = 1 << 30
"""Collections of generation 1 between two of generation 2."""

SELDOM: Final = 10_000
"""Objects allocated between two collections of generation 0: some 300 decisions of the
Conductor."""


def spare_the_old() -> Callable[[], None]:
    """Look for cycles among young objects only, from now on and in the whole process.

    For processes of our own: a library has no right to this.

    Returns:
        what ends it.
    """
    before = gc.get_threshold()
    gc.set_threshold(YOUNG, YOUNG_ROUNDS, NEVER)
    return lambda: gc.set_threshold(*before)


def look_seldom() -> Callable[[], None]:
    """Look for cycles seldom from now on, and never among what is there now; in the whole process.

    For processes of our own that make cycles (what is left of a request that broke), so that all
    ages have to be looked at, but of which only few calls may wait for that.

    Returns:
        what ends it.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(SELDOM, *before[1:])

    def end() -> None:
        gc.set_threshold(*before)
        gc.unfreeze()

    return end
