"""Counters and measurements of a node, as answers of the admin API."""

from kvstore.server.answers import Answer, WearCounts
from kvstore.server.nodes import MembershipState, NodeIndex, SessionFault, SharedDirectoryCounts


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


class SsdCounts(Answer, frozen=True):
    """The SSD tier; counters of records and syncs are absent while they are 0."""

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
    jobs: int
    errors: dict[str, int]
    failed_segments: dict[str, str]
    directories: list[DirectoryCounts]
    written_records: int = 0
    read_records: int = 0
    read_bytes: int = 0
    syncs: int = 0
    seals: int = 0
    drops: int = 0


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


class PeerSessionCounts(Answer, frozen=True):
    """The session that reads another node; see :class:`kvstore.server.nodes.NodeRow`."""

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
    """What the index knows of another node; see :class:`kvstore.server.nodes.NodeRow`."""

    current: bool
    why: str
    pages: dict[str, int]
    lag_s: float
    faults: dict[str, int]


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
    """The publisher of KV events; all 0 if events are off."""

    sequence_next: int = 0
    batches_sent: int = 0
    batches_dropped: int = 0
    batches_queued: int = 0
    batches_lost: int = 0
    followers: int = 0
    followers_cut: int = 0
    replays_served: int = 0
    replays_cut: int = 0
    snapshots_served: int = 0
    snapshots_cut: int = 0
    snapshots_refused: int = 0
    snapshots_s: float = 0.0
    audits_served: int = 0
    audits_cut: int = 0
    audits_refused: int = 0


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


class NodeStats(Answer, frozen=True):
    """All counters of the node; the first 100 spaces and sessions.

    ``unready``: why no page can be stored; empty if pages can be stored. ``session_bytes``: slot
    bytes that engines hold. ``core``: ``compiled`` or ``pure``. ``loop_lag_s``: maximum of the last
    15 to 30 s. ``latencies``: ``lookup``, ``acquire``, ``put``, ``wait``, ``disk_load``,
    ``peer_fetch`` and ``loop_turn``. ``lookups``: for the first 32 models, all others as ``other``.
    ``cluster``: None = this node is alone by its configuration.
    """

    node: str
    boot: str
    pid: int
    version: str
    uptime_s: float
    unready: str
    policy: str
    host: HostSizes
    populated_bytes: int
    missing_bytes: int
    memory_failures: int
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
    connections: int
    accepted_connections: int
    counts: dict[str, int]
    latency_bounds_s: list[float]
    latencies: dict[str, Latency]
    lookups: list[Lookups]
    core: str
    mover: str
    loop_lag_s: float
    events: EventCounts
    ssd: SsdCounts | None
    remote: RemoteCounts | None
    cluster: ClusterCounts | None
    admin: AdminCounts
    self_check: SelfCheckCounts


class HostTier(HostSizes, frozen=True, tag_field="tier", tag="host"):
    """Host memory."""

    state: str
    populated_bytes: int


class SsdTier(SsdCounts, frozen=True, tag_field="tier", tag="ssd"):
    """The SSDs."""


class TierList(Answer, frozen=True):
    """The tiers."""

    tiers: list[HostTier | SsdTier]
