"""A node's view of the other nodes of its cluster, as an answer of the admin API.

Everything is taken from the counts of the parts: sessions with other nodes, reads from them, the
index of their pages, and the service for them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from kvstore.server.answers import Answer, DirectoryState, Joined

NO_INDEX: Final = "the index does not follow it"
IN_SHARED: Final[Mapping[str, Any]] = {"current": True, "why": ""}
"""What the index knows of a node whose pages are in a directory that nodes share."""


class SessionFault(Answer, frozen=True):
    """How the session with another node ended, or why it could not begin.

    ``field``: what differs between the two nodes, if that refuses the session: ``cluster``,
    ``node``, ``protocol`` or ``scheme``.
    """

    cause: str
    why: str
    field: str
    s_ago: float


class NodeRow(Answer, frozen=True):
    """Another node, as this one sees it.

    ``state``: ``up`` = it has welcomed this node, ``refused`` = one of the two does not want the
    session. ``draining``: its record says so, and no pages are copied to it; a fixed list has no
    records, so it is always false there. ``boot``: empty before the first welcome. ``transport``:
    by which its pages are read; empty = none that both have. ``fault``: the last one, also when
    the session is up again. ``faults``: counts by cause. ``reads_here``: it has a session to read
    from this node.

    The index: ``indexed_pages``: pages that it knows the node to have, by medium. ``current``: its
    pages count; if not, ``index_why`` says why. ``lag_s``: from the publication of the newest
    events to their application; None = the index does not follow it, for example because nodes
    share a directory.

    Reads since the start: ``reads`` under way, ``unsettled_reads`` that have ended and whose bytes
    may still arrive. ``retried_pages``: missing pages that were then asked of another node.
    ``bytes_per_s``: as measured last; 0 = it gave none yet.
    """

    name: str
    endpoint: str
    boot: str
    state: Literal["up", "down", "refused"]
    draining: bool
    transport: str
    fault: SessionFault | None
    faults: dict[str, int]
    reads_here: bool
    indexed_pages: dict[str, int]
    current: bool
    index_why: str
    lag_s: float | None
    reads: int
    unsettled_reads: int
    fetched_pages: int
    fetched_bytes: int
    missing_pages: int
    retried_pages: int
    failed_reads: int
    bytes_per_s: int


class NodeIndex(Answer, frozen=True):
    """The index of other nodes' pages.

    ``left_out``: pages that found no room in it. ``restarts``: of its process.
    """

    entries: int
    entries_max: int
    left_out: int
    resident_bytes: int
    restarts: int


class SharedDirectoryCounts(Answer, frozen=True):
    """The directory in Redis.

    ``current``: all pages of this node are announced, but for the ``waiting`` ones, and Redis
    answers. ``trouble``: why the last call failed, by cause; empty = it did not; ``silent`` = the
    index process does not say.
    ``announced``: pages, changes included. ``announcements``: how often all pages were announced.
    ``faults``: those of the index process, by cause; of questions with ``ask_`` before it.
    ``asked``: questions that were answered. ``outstanding``: questions without an answer yet.
    ``why``: why the node's own events cannot be followed; empty if they can.
    ``unanswered``: questions of this node without an answer in time, by cause.
    """

    current: bool
    announced: int
    waiting: int
    announcements: int
    asked: int
    faults: dict[str, int]
    why: str
    trouble: str
    outstanding: int
    unanswered: dict[str, int]


class MembershipState(Answer, frozen=True):
    """Where the nodes of the cluster are known, and whether this one is among them.

    ``kind``: ``local``, ``etcd`` or ``redis``. ``state``: ``joining`` = it has not been one yet,
    ``joined``, ``away`` = the store does not answer, ``refused`` = it must not be: ``field`` says
    what refuses it (``name``, ``scheme``, ``protocol``). ``changes``: how often it came to each
    state. ``unreadable_records``: records of the store that describe no node.
    """

    kind: str
    state: Literal["joining", "joined", "away", "refused"]
    field: str
    why: str
    changes: dict[str, int]
    unreadable_records: int


class NodeList(Answer, frozen=True):
    """The nodes of the cluster.

    ``cluster``: its name; empty = this node is alone by its configuration. ``node``, ``boot``,
    ``endpoint``: this node. ``joined``: ``off``, ``alone`` = no session with any other node,
    ``partly`` = with some, ``joined`` = with all. ``membership``: None = this node is alone by its
    configuration. ``directory``: that of ``/readyz``: ``degraded`` = pages of a node that this one
    has a session with are not found, or not all nodes are followed, or those of this node are not
    found by others. ``shared``: None = each node follows the events of the others.
    ``not_followed``: nodes beyond the limit of nodes. ``not_admitted``: connections of other nodes
    that were refused, by cause.
    """

    cluster: str
    node: str
    boot: str
    endpoint: str
    joined: Joined
    directory: DirectoryState
    membership: MembershipState | None
    nodes: list[NodeRow]
    index: NodeIndex | None
    shared: SharedDirectoryCounts | None
    not_followed: list[str]
    not_admitted: dict[str, int]


def node_list(stats: Mapping[str, Any]) -> dict[str, Any]:
    """The :class:`NodeList` of a node, as plain values.

    Args:
        stats: its counters, a :class:`kvstore.server.counts.NodeStats` as plain values.
    """
    node, boot, cluster = stats["node"], stats["boot"], stats["cluster"]
    if not cluster:
        return {
            "cluster": "", "node": node, "boot": boot, "endpoint": "", "joined": "off",
            "directory": "off", "membership": None, "nodes": [], "index": None, "shared": None,
            "not_followed": [], "not_admitted": {},
        }  # fmt: skip
    reads = stats["remote"]["peers"]
    directory, service = cluster["directory"], cluster["service"]
    known = directory["peers"]
    shared = directory.get("shared")
    unknown = {} if shared is None else IN_SHARED
    rows = [
        _row(
            name,
            session,
            reads.get(name, {}),
            known.get(name, unknown),
            name in service["sessions"],
        )
        for name, session in sorted(cluster["peers"].items())
    ]
    return {
        "cluster": cluster["name"],
        "node": node,
        "boot": boot,
        "endpoint": cluster["endpoint"],
        "joined": _joined(sum(row["state"] == "up" for row in rows), len(rows)),
        "directory": _directory(rows, shared, directory["refused"]),
        "membership": cluster.get("membership"),  # an older node does not say it
        "nodes": rows,
        "index": {name: directory[name] for name in NodeIndex.__struct_fields__},
        "shared": shared,
        "not_followed": directory["refused"],
        "not_admitted": service["refused"],
    }


def _joined(up: int, others: int) -> Joined:
    if not up:
        return "alone"
    return "joined" if up == others else "partly"


def _directory(
    rows: Sequence[Mapping[str, Any]], shared: Mapping[str, Any] | None, refused: Sequence[str]
) -> DirectoryState:
    """Whether pages are found; those of a node without a session are no matter of the directory."""
    if shared is not None:
        return "current" if shared["current"] else "degraded"
    behind = any(row["state"] == "up" and not row["current"] for row in rows)
    return "degraded" if behind or refused else "current"


def _row(
    name: str, session: Mapping[str, Any], read: Mapping[str, Any], known: Mapping[str, Any],
    reads_here: bool,  # noqa: FBT001
) -> dict[str, Any]:  # fmt: skip
    fault = session["fault"]
    refused = fault is not None and fault["cause"] == "refused"
    return {
        "name": name,
        "endpoint": session["endpoint"],
        "boot": session["boot"],
        "state": "up" if session["up"] else "refused" if refused else "down",
        "draining": session.get("draining", False),  # an older node does not say it
        "transport": session["transport"] if session["up"] else "",
        "fault": fault,
        "faults": session["faults"],
        "reads_here": reads_here,
        "indexed_pages": known.get("pages", {}),
        "current": known.get("current", False),
        "index_why": known.get("why", NO_INDEX),
        "lag_s": known.get("lag_s"),
        "reads": read.get("jobs", 0),
        "unsettled_reads": read.get("unsettled_jobs", 0),
        "fetched_pages": read.get("fetched_pages", 0),
        "fetched_bytes": read.get("fetched_bytes", 0),
        "missing_pages": read.get("missing_pages", 0),
        "retried_pages": read.get("retried_pages", 0),
        "failed_reads": read.get("failed_jobs", 0),
        "bytes_per_s": read.get("bytes_per_s", 0),
    }
