"""Resets objects in a forked child, which cannot use its parent's threads, locks and connections.

Only the forking thread exists in a child. A lock that another thread held is never released, a
queue has no thread that empties it, and sockets are shared with the parent. So each object with one
of these registers here, and is reset in the child before any other code runs.
"""

import logging
import os
import weakref
from typing import Final, Protocol

log = logging.getLogger(__name__)


class Forkable(Protocol):
    """An object that is reset in a forked child."""

    def forked(self) -> None:
        """Reset the object; takes no lock, does not wait and does not raise."""


_members: Final["weakref.WeakSet[Forkable]"] = weakref.WeakSet()
_of_parents: Final[list[object]] = []
_forks = 0


def keep(of_parent: object) -> None:
    """Keep what is of the parent's device: CUDA aborts a child that frees it."""
    _of_parents.append(of_parent)


def register(member: Forkable) -> None:
    """Call ``member.forked()`` in every forked child, while ``member`` exists."""
    _members.add(member)


def generation() -> int:
    """Number of forks before this process: a child's number differs from its parent's."""
    return _forks


def _in_child() -> None:
    global _forks
    _forks += 1
    for member in list(_members):
        try:
            member.forked()
        except Exception:
            log.exception("%s was not reset in a forked child", type(member).__name__)


os.register_at_fork(after_in_child=_in_child)
