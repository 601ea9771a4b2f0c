"""Whether the core of this installation is compiled and its mover native."""

from typing import NamedTuple

from kvstore import mover
from kvstore.node.describe import core


class Installed(NamedTuple):
    """What was built when kvstore was installed.

    Attributes:
        core: ``compiled`` or ``pure``: how the modules that decide are run.
        mover: description of the implementation that copies and digests.
    """

    core: str
    mover: str


def installed() -> Installed:
    """What this process uses."""
    return Installed(core(), mover.description)
