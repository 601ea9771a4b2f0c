"""The label with which an engine's processes connect to their node: its name and more. Pure.

The Conductor uses the name to find the sessions of an engine that registered with it, and so the
space, the shards and the node of that engine.
"""

import hashlib
from typing import NamedTuple

from kvstore.protocol.page import INSTANCE_BYTES, EngineLabel


class EngineSources(NamedTuple):
    """Where an engine publishes its own KV events: :class:`~kvstore.protocol.page.EngineLabel`."""

    events: str = ""
    events_bind: str = ""
    events_replay: str = ""


def engine_label(
    chosen: str, derived: str, start: str, rank: int | None, sources: EngineSources,
    block_tokens: int,
) -> EngineLabel | None:  # fmt: skip
    """The label of an engine's process.

    Args:
        chosen: the name that an operator chose; empty = none.
        derived: the name to use otherwise, ``host:port``; empty = unknown.
        start: any text that identifies one start of the engine, equal in all its processes.
        rank: data-parallel rank; None = the only one.
        sources: where the engine publishes events.
        block_tokens: tokens of one of its blocks.

    Returns:
        None if no name is known.
    """
    name = chosen or derived
    if not name:
        return None
    return EngineLabel(
        name=name if rank is None else f"{name}/dp{rank}",
        instance=hashlib.sha256(start.encode()).digest()[:INSTANCE_BYTES],
        chosen=bool(chosen),
        events=sources.events,
        events_bind=sources.events_bind,
        events_replay=sources.events_replay,
        block_tokens=block_tokens,
    )
