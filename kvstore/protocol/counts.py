"""Defines a node's counters and measurements, which its parts fill in and the admin API serves.

They are of the protocol because each room of the node counts what it does, and the admin process,
the metrics and the command read it.
"""

from typing import Final, Literal

from msgspec import Struct

Joined = Literal["off", "alone", "partly", "joined"]
DirectoryState = Literal["off", "current", "degraded"]


class Answer(Struct, frozen=True, kw_only=True, gc=False):
    """Base of all answers; they contain no cycles, so the garbage collector can skip them."""


class HostSizes(Answer, frozen=True):
    """Slot bytes of host memory by state.

    ``withheld``: not available because clients of the previous run still map as much memory.
    ``retiring``: in extents that will get new memory, because a process that cannot be watched may
    still touch them.
    """

    capacity_bytes: int
    withheld_bytes: int
    free_bytes: int
    writing_bytes: int
    ready_bytes: int
    pinned_bytes: int
    limbo_bytes: int
    retiring_bytes: int


class SpaceCounts(Answer, frozen=True):
    """Summary of one space."""

    space: str
    model: str
    kv_dtype: str
    page_tokens: int
    tenant: str
    revision: str
    scope: str
    pages: int
    shards: int
    host_bytes: int
    ssd_bytes: int


class SessionCounts(Answer, frozen=True):
    """Summary of one session; ``engine``: its engine's name, None = it has none.

    ``peer``: it is another node, not an engine.
    """

    name: str
    engine: str | None
    tenant: str
    processes: int
    lost_processes: int
    used_bytes: int
    quota_bytes: int
    prefill_s_per_token: float
    peer: bool


class AdminCounts(Answer, frozen=True):
    """The admin process; ``restarts``: how often it was restarted."""

    pid: int
    restarts: int


class SelfCheckCounts(Answer, frozen=True):
    """How often the node has looked at all of its state, and at how many keys so far."""

    rounds: int
    pages: int


class DirectoryCounts(Answer, frozen=True):
    """One directory of the SSD tier."""

    path: str
    direct_io: bool
    capacity_bytes: int
    used_bytes: int
    segments: int


class WearCounts(Answer, frozen=True):
    """Pages admitted to the SSDs.

    ``refused``: pages whose memory was needed; a page before them is asked about in its turn.
    ``today_bytes``: admitted since the day began, counted from the clock's zero.
    ``forecast_bytes``: for a whole day, at the mean rate since the first decision.
    ``budget_bytes``: 0 = no limit.
    """

    admitted: int
    refused: int
    today_bytes: int
    forecast_bytes: int
    budget_bytes: int


class RecordCounts(Answer, frozen=True):
    """What was read and written on the SSDs, and what failed.

    ``jobs``: accepted and not completed. ``errors``: failed jobs by error code.
    ``failed_segments``: files that could not be synced, and why, by number. ``seals`` and
    ``drops``: footers written, files deleted.
    """

    jobs: int
    errors: dict[str, int]
    failed_segments: dict[str, str]
    directories: list[DirectoryCounts]
    written_records: int
    read_records: int
    read_bytes: int
    syncs: int
    seals: int
    drops: int


NO_RECORDS: Final = RecordCounts(
    jobs=0, errors={}, failed_segments={}, directories=[], written_records=0, read_records=0,
    read_bytes=0, syncs=0, seals=0, drops=0,
)  # fmt: skip
"""Of a disk side without a log of records, such as a simulated one."""


class SsdCounts(RecordCounts, frozen=True):
    """The SSD tier."""

    write: str
    sync: str
    admission: str
    wear: WearCounts
    writes: int
    loads: int
    checks: int
    in_flight_bytes: int
    backlog_pages: int
    tombstone_keys_waiting: int
    degraded: bool
    capacity_bytes: int
    used_bytes: int
    live_bytes: int
    dead_bytes: int
    segments: int
    written_bytes: int
    carried_bytes: int
    reclaimed_segments: int
    write_amplification: float
    recovery_s: float


class PeerCounts(Answer, frozen=True):
    """Reads from one peer.

    ``bytes_per_s``: as measured last, 0 = it gave none yet. ``retried_pages``: missing pages that
    were then asked of another peer. ``failed_jobs``: reads that did not bring all pages.
    ``unsettled_jobs``: reads that have ended and whose bytes may still arrive.
    """

    bytes_per_s: int
    jobs: int
    unsettled_jobs: int
    fetched_pages: int
    fetched_bytes: int
    missing_pages: int
    retried_pages: int
    failed_jobs: int


class RemoteCounts(Answer, frozen=True):
    """What is read from other nodes, and what is known of them.

    ``unsettled_jobs``: reads that have ended and whose bytes may still arrive. ``in_flight_bytes``:
    slot bytes of all of them. ``locating``: questions to the directory. ``located_chains``:
    questions and remembered answers.
    """

    jobs: int
    unsettled_jobs: int
    in_flight_bytes: int
    in_flight_bytes_max: int
    locating: int
    located_chains: int
    peers: dict[str, PeerCounts]


class SessionFault(Answer, frozen=True):
    """How the session with another node ended, or why it could not begin.

    ``field``: what differs between the two nodes, if that refuses the session: ``cluster``,
    ``node``, ``protocol`` or ``scheme``.
    """

    cause: str
    why: str
    field: str
    s_ago: float


class PeerSessionCounts(Answer, frozen=True):
    """The session that reads another node; see :class:`NodeRow`."""

    up: bool
    draining: bool
    endpoint: str
    fault: SessionFault | None
    faults: dict[str, int]
    boot: str
    transport: str
    fetches: int


class PeerServiceCounts(Answer, frozen=True):
    """The service for other nodes.

    ``sessions``: nodes that have one. ``refused``: connections by cause. ``loans``: leases of other
    nodes that are open, and counts.
    """

    sessions: list[str]
    followers: int
    accepted_connections: int
    refused: dict[str, int]
    loans: dict[str, int]


class EventTunnelCounts(Answer, frozen=True):
    """Other nodes that follow the events of this one, and connections that ended, by cause."""

    following: list[str]
    faults: dict[str, int]


class FollowedPeer(Answer, frozen=True):
    """What the index knows of another node; see :class:`NodeRow`."""

    current: bool
    why: str
    pages: dict[str, int]
    lag_s: float
    faults: dict[str, int]


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


class PeerDirectoryCounts(NodeIndex, frozen=True):
    """The index of other nodes' pages; ``refused``: nodes beyond the limit of nodes."""

    peers: dict[str, FollowedPeer]
    refused: list[str]
    shared: SharedDirectoryCounts | None = None


class CopyCounts(Answer, frozen=True):
    """Copies of this node's pages at other nodes.

    ``running``: nodes that are asked to bring pages now. ``copied_pages``: pages of one shard that
    other nodes said to have when they were asked. ``failed``: times that one did not get all pages
    that it was asked for.
    """

    running: int
    copied_pages: int
    failed: int


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


class ClusterCounts(Answer, frozen=True):
    """The side towards the other nodes of the cluster; ``GET /v1/nodes`` shows it by node.

    ``state``: ``up`` or ``draining``. ``transfers``: reads whose bytes may still arrive.
    ``transports``: counts of each.
    """

    name: str
    endpoint: str
    state: str
    copies: CopyCounts
    membership: MembershipState
    service: PeerServiceCounts
    events: EventTunnelCounts
    directory: PeerDirectoryCounts
    peers: dict[str, PeerSessionCounts]
    transfers: int
    transports: dict[str, dict[str, int]]


class EventCounts(Answer, frozen=True):
    """The publisher of KV events; all 0 if events are off.

    Attributes:
        sequence_next: number of the next batch = number of batches published or dropped.
        batches_sent: batches sent to followers.
        batches_dropped: lost because of a full queue, an orderly end, or an encoding error.
        batches_queued: batches that wait to be sent.
        batches_lost: batches not sent to a slow follower, counted per follower.
        followers: open connections, including replays.
        followers_cut: connections closed because of a fault, or refused.
        replays_served: replay requests answered completely.
        replays_cut: answers aborted because the client does not read, and malformed requests.
        snapshots_served: snapshots sent completely.
        snapshots_cut: snapshots not sent completely: the client left or does not read.
        snapshots_refused: snapshots refused because of too many others.
        snapshots_s: total seconds that sending the complete snapshots took.
        audits_served: other questions (audits) answered completely.
        audits_cut: audits begun but not answered completely.
        audits_refused: audits refused, and malformed questions.
    """

    sequence_next: int
    batches_sent: int
    batches_dropped: int
    batches_queued: int
    batches_lost: int
    followers: int
    followers_cut: int
    replays_served: int
    replays_cut: int
    snapshots_served: int
    snapshots_cut: int
    snapshots_refused: int
    snapshots_s: float
    audits_served: int
    audits_cut: int
    audits_refused: int


NO_EVENTS: Final = EventCounts(
    sequence_next=0, batches_sent=0, batches_dropped=0, batches_queued=0, batches_lost=0,
    followers=0, followers_cut=0, replays_served=0, replays_cut=0, snapshots_served=0,
    snapshots_cut=0, snapshots_refused=0, snapshots_s=0.0, audits_served=0, audits_cut=0,
    audits_refused=0,
)  # fmt: skip
"""Of a node that publishes none."""


class Latency(Answer, frozen=True):
    """A histogram: one count for each bound, and one for longer times."""

    count: int
    sum_s: float
    buckets: list[int]


class Lookups(Answer, frozen=True):
    """Keys in answered lookups of a model, by the tier they were found in."""

    model: str
    host_pages: int
    ssd_pages: int
    missed_pages: int


class NodeCounts(Answer, frozen=True):
    """Counters of a node's state; the first 100 spaces and sessions.

    ``core``: ``compiled`` or ``pure``. ``session_bytes``: slot bytes that engines hold.
    ``latencies``: ``lookup``, ``acquire``, ``put``, ``wait``, ``disk_load``, ``peer_fetch`` and
    ``loop_turn``. ``lookups``: for the first 32 models, all others as ``other``.
    """

    node: str
    boot: str
    core: str
    policy: str
    host: HostSizes
    pages: int
    spaces: list[SpaceCounts]
    spaces_total: int
    sessions: list[SessionCounts]
    sessions_total: int
    session_bytes: int
    leases: int
    puts: int
    slots_ahead: int
    slots_ahead_bytes: int
    waiting_requests: int
    waiting_bytes: int
    unwatched_processes: int
    counts: dict[str, int]
    latency_bounds_s: list[float]
    latencies: dict[str, Latency]
    lookups: list[Lookups]
    ssd: SsdCounts | None
    remote: RemoteCounts | None
    self_check: SelfCheckCounts


class NodeStats(NodeCounts, frozen=True):
    """All counters of the node; the first 100 spaces and sessions.

    ``unready``: why no page can be stored; empty if pages can be stored. ``loop_lag_s``: maximum of
    the last 15 to 30 s. ``cluster``: None = this node is alone by its configuration.
    """

    pid: int
    version: str
    uptime_s: float
    unready: str
    populated_bytes: int
    missing_bytes: int
    memory_failures: int
    connections: int
    accepted_connections: int
    mover: str
    loop_lag_s: float
    events: EventCounts
    cluster: ClusterCounts | None
    admin: AdminCounts


class HostTier(HostSizes, frozen=True, tag_field="tier", tag="host"):
    """Host memory."""

    state: str
    populated_bytes: int


class SsdTier(SsdCounts, frozen=True, tag_field="tier", tag="ssd"):
    """The SSDs."""


class TierList(Answer, frozen=True):
    """The tiers."""

    tiers: list[HostTier | SsdTier]


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
