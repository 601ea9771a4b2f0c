"""What a forked child must forget: its parent's threads, locks and connections are not its own.

Only the forking thread goes on in a child. A lock that another thread held stays held for ever, a
queue has nobody who empties it, and a socket is shared with the parent. So whatever has one of
these registers here, and makes itself anew in the child before anything else runs there.
"""

import os
import weakref
from typing import Final, Protocol


class Forkable(Protocol):
    """What must be told that it is in a forked child."""

    def forked(self) -> None:
        """Forget the parent's; takes no lock, waits for nothing and raises nothing."""


_members: Final["weakref.WeakSet[Forkable]"] = weakref.WeakSet()
_forks = 0


def register(member: Forkable) -> None:
    """Tell ``member`` in every forked child, as long as it lives."""
    _members.add(member)


def generation() -> int:
    """How many forks lie before this process: a child has a number that its parent never has."""
    return _forks


def _in_child() -> None:
    global _forks
    _forks += 1
    for member in list(_members):
        member.forked()


os.register_at_fork(after_in_child=_in_child)
