"""A node's view of the other nodes of its cluster, as an answer of the admin API.

Everything is taken from the counts of the parts: sessions with other nodes, reads from them, the
index of their pages, and the service for them.
"""

from collections.abc import Sequence
from typing import Final

from kvstore.protocol.counts import (
    DirectoryState,
    FollowedPeer,
    Joined,
    NodeIndex,
    NodeList,
    NodeRow,
    NodeStats,
    PeerCounts,
    PeerSessionCounts,
    SharedDirectoryCounts,
)

NO_INDEX: Final = "the index does not follow it"
_NOT_READ: Final = PeerCounts(
    bytes_per_s=0, jobs=0, unsettled_jobs=0, fetched_pages=0, fetched_bytes=0, missing_pages=0,
    retried_pages=0, failed_jobs=0,
)  # fmt: skip


def node_list(stats: NodeStats) -> NodeList:
    """The nodes of a cluster, from the counters of one of them."""
    cluster = stats.cluster
    if cluster is None:
        return NodeList(
            cluster="", node=stats.node, boot=stats.boot, endpoint="", joined="off",
            directory="off", membership=None, nodes=[], index=None, shared=None, not_followed=[],
            not_admitted={},
        )  # fmt: skip
    reads = stats.remote.peers if stats.remote is not None else {}
    directory, service = cluster.directory, cluster.service
    shared = directory.shared
    rows = [
        _row(
            name, session, reads.get(name, _NOT_READ), directory.peers.get(name),
            reads_here=name in service.sessions, is_shared=shared is not None,
        )
        for name, session in sorted(cluster.peers.items())
    ]  # fmt: skip
    return NodeList(
        cluster=cluster.name, node=stats.node, boot=stats.boot, endpoint=cluster.endpoint,
        joined=_joined(sum(row.state == "up" for row in rows), len(rows)),
        directory=_directory(rows, shared, directory.refused), membership=cluster.membership,
        nodes=rows,
        index=NodeIndex(
            entries=directory.entries, entries_max=directory.entries_max,
            left_out=directory.left_out, resident_bytes=directory.resident_bytes,
            restarts=directory.restarts,
        ),
        shared=shared, not_followed=directory.refused, not_admitted=service.refused,
    )  # fmt: skip


def _joined(up: int, others: int) -> Joined:
    if not up:
        return "alone"
    return "joined" if up == others else "partly"


def _directory(
    rows: Sequence[NodeRow], shared: SharedDirectoryCounts | None, refused: Sequence[str]
) -> DirectoryState:
    """Whether pages are found; those of a node without a session are no matter of the directory."""
    if shared is not None:
        return "current" if shared.current else "degraded"
    behind = any(row.state == "up" and not row.current for row in rows)
    return "degraded" if behind or refused else "current"


def _row(
    name: str, session: PeerSessionCounts, read: PeerCounts, known: FollowedPeer | None,
    *, reads_here: bool, is_shared: bool,
) -> NodeRow:  # fmt: skip
    """The row of a node; ``is_shared``: its pages are in a directory that the nodes share."""
    fault = session.fault
    refused = fault is not None and fault.cause == "refused"
    return NodeRow(
        name=name, endpoint=session.endpoint, boot=session.boot,
        state="up" if session.up else "refused" if refused else "down", draining=session.draining,
        transport=session.transport if session.up else "", fault=fault, faults=session.faults,
        reads_here=reads_here,
        indexed_pages=known.pages if known is not None else {},
        current=known.current if known is not None else is_shared,
        index_why=known.why if known is not None else "" if is_shared else NO_INDEX,
        lag_s=known.lag_s if known is not None else None, reads=read.jobs,
        unsettled_reads=read.unsettled_jobs, fetched_pages=read.fetched_pages,
        fetched_bytes=read.fetched_bytes, missing_pages=read.missing_pages,
        retried_pages=read.retried_pages, failed_reads=read.failed_jobs,
        bytes_per_s=read.bytes_per_s,
    )  # fmt: skip
