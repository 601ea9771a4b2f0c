"""Keeps the names of engines apart: two live engines of a node never have the same one. Pure."""

from collections import Counter
from collections.abc import Iterable

from kvstore.errors import EngineNameTaken
from kvstore.page import EngineLabel
from kvstore.state.tree.sessions import Session


def free_label(
    label: EngineLabel | None, sessions: Iterable[Session], counts: Counter[str]
) -> EngineLabel | None:
    """The label of an engine that says Hello; None if another live engine has its name.

    An engine lives while one of its processes is connected. Processes with the same ``instance``
    are one engine, in as many sessions as they like.

    Args:
        label: as its process sent it.
        sessions: all sessions of the node.
        counts: the node's counts; those that lose a derived name are counted.

    Raises:
        EngineNameTaken: an operator chose the name of another live engine.
    """
    if label is None:
        return None
    for session in sessions:
        other = session.engine
        if other is None or other.name != label.name or other.instance == label.instance:
            continue
        if not session.live:
            continue
        if not label.chosen:
            counts["unnamed_duplicates"] += 1
            return None
        pids = sorted({one.peer.pid for one in session.processes.values() if not one.lost})
        raise EngineNameTaken(
            f"an engine named {label.name!r} is connected already (processes {pids}): give each"
            " engine a name of its own (the option `engine` of its adapter), or end that one"
        )
    return label
