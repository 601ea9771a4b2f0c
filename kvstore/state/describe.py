"""Everything that can be counted in a page table, as plain values. Pure."""

from typing import Any

from kvstore.state.pages import PageTable
from kvstore.state.sessions import Session
from kvstore.state.tree import Space


def describe(pages: PageTable, sessions: list[Session]) -> dict[str, Any]:
    """One snapshot."""
    slots = pages.slots.stats()
    processes = [process for session in sessions for process in session.processes.values()]
    return {
        "host": {name: getattr(slots, name) for name in slots.__slots__},
        "pages": sum(len(space.nodes) for space in pages.spaces),
        "spaces": [
            {
                **_identity(space),
                "pages": len(space.nodes),
                "shards": len(space.shards),
                "host_bytes": space.host_bytes,
                "ssd_bytes": space.disk_bytes,
            }
            for space in pages.spaces
        ],
        "sessions": [
            {
                "name": session.name,
                "tenant": session.domain,
                "processes": len(session.processes),
                "lost_processes": sum(p.lost for p in session.processes.values()),
                "used_bytes": session.used_bytes,
                "quota_bytes": session.quota_bytes,
                "prefill_s_per_token": session.prefill_s_per_token,
            }
            for session in sessions
        ],
        "leases": sum(len(process.leases) for process in processes),
        "puts": sum(len(process.puts) for process in processes),
        "counts": dict(pages.counts),
    }


def _identity(space: Space) -> dict[str, Any]:
    identity = space.identity
    fields = {name: getattr(identity, name) for name in identity.__struct_fields__}
    return {"space": identity.digest.hex(), **fields}
