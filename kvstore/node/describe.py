"""All counts and sizes of a node's state, as one snapshot."""

from itertools import islice
from typing import Final

from kvstore.node.node import Node
from kvstore.protocol.counts import (
    NodeCounts,
    SelfCheckCounts,
    SessionCounts,
    SpaceCounts,
    SsdCounts,
)
from kvstore.state.metering import BOUNDS_S
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.sessions import Session

LISTED_MAX: Final = 100
"""Maximum spaces and sessions listed in a snapshot, so that it never takes long."""
_UNCHECKED: Final = SelfCheckCounts(rounds=0, pages=0)


def core() -> str:
    """How the core, which includes this module, is run: ``compiled`` or ``pure``."""
    return "pure" if __file__.endswith(".py") else "compiled"


def work_left(node: Node) -> str:
    """What a later turn goes on with, in words for the log."""
    held, pages = node.pages.residents, node.pages
    parts = (
        ("descendants of dropped pages", held.orphans),
        ("an extent that is being emptied", held.draining.now),
        ("leaves that were skipped", held.draining.returning),
        ("entries of dropped pages in eviction queues", held.eviction.behind),
        ("loads from the SSDs", held.disk.loads.may_go_on),
        ("writes to the SSDs", held.disk.unfinished),
        ("slots ahead", pages.ahead.used),
        ("what lost or ended processes held", node.leaving.losing or node.leaving.ending),
        ("waiting requests", node.waiting.may_go_on),
    )
    names = [name for name, left in parts if left]
    return f"a later turn: {', '.join(names) or 'deadlines'}"


def describe(
    node: Node, ssd: SsdCounts | None = None, self_check: SelfCheckCounts = _UNCHECKED
) -> NodeCounts:
    """A snapshot; lists the first :data:`LISTED_MAX` spaces and sessions, and their numbers.

    Args:
        node: the node.
        ssd: counts of its SSD tier; None = it has none.
        self_check: progress of its idle checks.
    """
    pages, sessions = node.pages, list(node.sessions.values())
    spaces = list(pages.spaces)
    processes = [process for session in sessions for process in session.processes.values()]
    ahead, meter = pages.ahead, pages.meter
    return NodeCounts(
        node=node.name, boot=node.boot.hex(), core=core(), policy=pages.eviction.policy,
        host=pages.slots.stats(), pages=sum(len(space.nodes) for space in spaces),
        spaces=[_space(one) for one in islice(spaces, LISTED_MAX)], spaces_total=len(spaces),
        sessions=[_session(one) for one in islice(sessions, LISTED_MAX)],
        sessions_total=len(sessions),
        session_bytes=sum(session.used_bytes for session in sessions),
        leases=sum(len(process.leases) for process in processes),
        puts=sum(len(process.puts) for process in processes) - ahead.slots,
        slots_ahead=ahead.slots, slots_ahead_bytes=ahead.size_bytes,
        waiting_requests=len(node.waiting), waiting_bytes=node.waiting.size_bytes,
        unwatched_processes=sum(
            not (one.peer.watched or one.peer.remote) for one in node.processes.values()
        ),
        counts=dict(pages.counts), latency_bounds_s=list(BOUNDS_S), latencies=meter.latencies(),
        lookups=meter.lookups(), ssd=ssd,
        remote=node.remote.stats() if node.remote is not None else None, self_check=self_check,
    )  # fmt: skip


def _space(space: PrefixTree) -> SpaceCounts:
    of = space.identity
    return SpaceCounts(
        space=space.label, model=of.model, kv_dtype=of.kv_dtype, page_tokens=of.page_tokens,
        tenant=of.tenant, revision=of.revision, scope=of.scope, pages=len(space.nodes),
        shards=len(space.shards), host_bytes=space.host_bytes, ssd_bytes=space.disk_bytes,
    )  # fmt: skip


def _session(session: Session) -> SessionCounts:
    return SessionCounts(
        name=session.name, engine=session.engine.name if session.engine is not None else None,
        tenant=session.domain, processes=len(session.processes),
        lost_processes=sum(one.lost for one in session.processes.values()),
        used_bytes=session.used_bytes, quota_bytes=session.quota_bytes,
        prefill_s_per_token=session.prefill_s_per_token, peer=session.remote,
    )  # fmt: skip
