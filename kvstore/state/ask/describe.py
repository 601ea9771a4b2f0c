"""All counts and sizes of a page table, as plain values. Pure."""

from dataclasses import asdict
from itertools import islice
from typing import Any, Final

from kvstore.state.table.pages import PageTable
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.sessions import Session

LISTED_MAX: Final = 100
"""Maximum spaces and sessions listed in a snapshot, so that it never takes long."""


def core() -> str:
    """How the core, which includes this module, is run: ``compiled`` or ``pure``."""
    return "pure" if __file__.endswith(".py") else "compiled"


def describe(pages: PageTable, sessions: list[Session]) -> dict[str, Any]:
    """A snapshot; lists the first :data:`LISTED_MAX` spaces and sessions, and their numbers."""
    slots = pages.slots.stats()
    spaces = list(pages.spaces)
    processes = [process for session in sessions for process in session.processes.values()]
    return {
        "core": core(),
        "host": asdict(slots),
        "pages": sum(len(space.nodes) for space in spaces),
        "spaces_total": len(spaces),
        "spaces": [
            {
                **_identity(space),
                "pages": len(space.nodes),
                "shards": len(space.shards),
                "host_bytes": space.host_bytes,
                "ssd_bytes": space.disk_bytes,
            }
            for space in islice(spaces, LISTED_MAX)
        ],
        "sessions_total": len(sessions),
        "sessions": [
            {
                "name": session.name,
                "engine": session.engine.name if session.engine is not None else None,
                "tenant": session.domain,
                "processes": len(session.processes),
                "lost_processes": sum(p.lost for p in session.processes.values()),
                "used_bytes": session.used_bytes,
                "quota_bytes": session.quota_bytes,
                "prefill_s_per_token": session.prefill_s_per_token,
                "peer": session.remote,
            }
            for session in islice(sessions, LISTED_MAX)
        ],
        "session_bytes": sum(session.used_bytes for session in sessions),
        "leases": sum(len(process.leases) for process in processes),
        "puts": sum(len(process.puts) for process in processes) - pages.ahead.slots,
        "slots_ahead": pages.ahead.slots,
        "slots_ahead_bytes": pages.ahead.size_bytes,
        "counts": dict(pages.counts),
        **pages.meter.stats(),
    }


def _identity(space: PrefixTree) -> dict[str, Any]:
    identity = space.identity
    fields = {name: getattr(identity, name) for name in identity.__struct_fields__}
    return {"space": space.label, **fields}
