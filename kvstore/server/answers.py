"""What the node answers to the operations of its admin process; the JSON of the admin API."""

from typing import Any, Literal

from msgspec import Struct

from kvstore.page import Layout

Value = int | float | bool | str | None


class Answer(Struct, frozen=True, kw_only=True, gc=False):
    """Base of all; none refers to itself, so the garbage collector need not look at them."""


class Fault(Answer, frozen=True):
    """Why a request was refused; ``field`` is empty when no part of it in particular is wrong."""

    code: str
    message: str
    field: str


class Refusal(Answer, frozen=True):
    """The body of every answer that is no success."""

    error: Fault


class Health(Answer, frozen=True):
    """The node answers."""

    status: Literal["ok"] = "ok"


class Readiness(Answer, frozen=True):
    """The node has memory to store pages in.

    ``withheld_bytes``: memory that clients of the previous boot still hold. ``ssd``: ``off``,
    ``ready`` or ``degraded``. ``unwatched_processes``: processes whose end nobody can see.
    """

    withheld_bytes: int
    ssd: str
    unwatched_processes: int
    status: Literal["ready"] = "ready"


# Spaces, pages, sessions


class ShardRow(Answer, frozen=True):
    """One shard of a space: see ``kvstore.page.ShardSpec``."""

    layout: Layout
    layers: tuple[int, int]
    heads: tuple[int, int]
    group: str
    window_pages: int
    page_bytes: int


class SpaceRow(Answer, frozen=True):
    """One space; limits of 0 bytes are none."""

    space: str
    model: str
    kv_dtype: str
    page_tokens: int
    tenant: str
    revision: str
    scope: str
    pages: int
    host_bytes: int
    quota_bytes: int
    reserved_bytes: int
    ssd_bytes: int
    ssd_quota_bytes: int
    ssd_reserved_bytes: int
    shards: list[ShardRow]


class SpaceList(Answer, frozen=True):
    """A stretch of spaces; ``next`` is the cursor of the one after it, None = that was all."""

    spaces: list[SpaceRow]
    next: int | None
    total: int


class PageShard(Answer, frozen=True):
    """The page of one shard; ``digest`` None while it is being written."""

    state: Literal["ready", "writing"]
    tiers: list[str]
    bytes: int
    digest: str | None


class PageRow(Answer, frozen=True):
    """The pages of one key; ages in seconds, None = not known, or never."""

    key: str
    parent: str | None
    depth: int
    serial: int
    tier: str
    children: int
    hits: int
    stored_s_ago: float | None
    used_s_ago: float | None
    expires_in_s: float | None
    shards: dict[str, PageShard]


class PageDetail(PageRow, frozen=True):
    """One key; ``pins``: how many pins of operators cover it."""

    space: str
    pins: int
    read_once: bool
    first_children: list[str]


class PageList(Answer, frozen=True):
    """A stretch of pages; ``next`` is the cursor of the one after it, None = that was all."""

    pages: list[PageRow]
    next: str | None
    total: int | None = None


class ProcessRow(Answer, frozen=True):
    """One process of an engine.

    ``watched``: its end will be seen. ``lost``: its connection broke, its end was not seen.
    """

    pid: int
    watched: bool
    lost: bool
    leases: int
    expired_leases: int
    puts: int


class SessionRow(Answer, frozen=True):
    """One engine and what it holds."""

    name: str
    tenant: str
    used_bytes: int
    quota_bytes: int
    prefill_s_per_token: float
    processes: list[ProcessRow]


class SessionList(Answer, frozen=True):
    """A stretch of sessions; ``next`` is the cursor of the one after it, None = that was all."""

    sessions: list[SessionRow]
    next: int | None
    total: int


# Explanations


class PageSizes(Answer, frozen=True):
    """Tokens in a page: of the space that was asked for (and its label), and of all spaces."""

    space: str | None
    page_tokens: int | None
    sizes: list[int]


class Run(Answer, frozen=True):
    """A space that holds the leading pages of a chain."""

    space: str
    pages: int


class Runs(Answer, frozen=True):
    """The spaces that hold the most, all equally many."""

    runs: list[Run]


# Pins, limits, policies


class Pinned(Answer, frozen=True):
    """A pin that was made."""

    pin: int
    pages: int
    bytes: int
    tier: str


class Unpinned(Answer, frozen=True):
    """A pin that ended."""

    pin: int
    pages: int
    bytes: int


class PinRow(Answer, frozen=True):
    """One pin; ``ends_in_s`` None = when it is unpinned."""

    pin: int
    space: str
    key: str
    tier: str
    pages: int
    bytes: int
    ends_in_s: float | None


class PinList(Answer, frozen=True):
    """All pins, and what is used of the budgets."""

    pins: list[PinRow]
    used_bytes: int
    budget_bytes: int
    ssd_used_bytes: int
    ssd_budget_bytes: int


class QuotaRow(Answer, frozen=True):
    """The limits of a space in a tier, and what it has there."""

    space: str
    tier: str
    quota_bytes: int
    reserved_bytes: int
    used_bytes: int


class QuotaList(Answer, frozen=True):
    """All limits."""

    quotas: list[QuotaRow]


class Wear(Answer, frozen=True):
    """What was admitted to the SSDs; ``forecast_bytes``: of a whole day; a budget of 0 is none."""

    admitted: int
    refused: int
    today_bytes: int
    forecast_bytes: int
    budget_bytes: int


class SsdPolicy(Answer, frozen=True):
    """When pages are written to the SSDs and synced, and which."""

    write: str
    sync: str
    admission: str
    wear: Wear


class Policy(Answer, frozen=True):
    """``name`` is at work, ``configured`` the one that a start takes; ``ssd`` if there is one."""

    name: str
    known: list[str]
    configured: str
    ssd: SsdPolicy | None = None


class PolicySet(Policy, frozen=True, kw_only=True):
    """The policies at work now, and the eviction policy before."""

    previous: str


# Jobs


class JobFault(Answer, frozen=True):
    """Why a job failed."""

    code: str
    message: str


class JobRow(Answer, frozen=True):
    """One job: ``done`` steps of ``total`` (an estimate), and what it found so far."""

    job: int
    kind: str
    subject: dict[str, Value]
    state: Literal["running", "done", "failed", "cancelled"]
    done: int
    total: int
    result: dict[str, Value]
    error: JobFault | None
    seconds: float


class JobList(Answer, frozen=True):
    """Jobs, the newest first."""

    jobs: list[JobRow]


# What is counted


class HostSizes(Answer, frozen=True):
    """Slot bytes of host memory by state.

    ``withheld``: held by clients of the previous boot. ``retiring``: of extents that get new memory
    because a process that nobody can watch may still touch them.
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
    """One space in short."""

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
    """One engine in short."""

    name: str
    tenant: str
    processes: int
    lost_processes: int
    used_bytes: int
    quota_bytes: int
    prefill_s_per_token: float


class AdminCounts(Answer, frozen=True):
    """The admin process; ``restarts``: how often it ended and was started again."""

    pid: int
    restarts: int


class Directory(Answer, frozen=True):
    """One directory of the SSD tier."""

    path: str
    direct_io: bool
    capacity_bytes: int
    used_bytes: int
    segments: int


class SsdCounts(Answer, frozen=True):
    """The SSD tier; counters of what was moved are absent while they are 0."""

    write: str
    sync: str
    admission: str
    wear: Wear
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
    directories: list[Directory]
    written_records: int = 0
    read_records: int = 0
    read_bytes: int = 0
    syncs: int = 0
    seals: int = 0
    drops: int = 0


class EventCounts(Answer, frozen=True):
    """The publisher of KV events; empty when they are off."""

    sequence_next: int = 0
    batches_sent: int = 0
    batches_dropped: int = 0
    batches_queued: int = 0
    batches_lost: int = 0
    followers: int = 0
    followers_cut: int = 0
    replays_served: int = 0
    replays_cut: int = 0


class Latency(Answer, frozen=True):
    """How often something took how long: one count for each bound, and what took longer."""

    count: int
    sum_s: float
    buckets: list[int]


class Lookups(Answer, frozen=True):
    """Keys that answered lookups of a model had asked for, by where they were found."""

    model: str
    host_pages: int
    ssd_pages: int
    missed_pages: int


class Stats(Answer, frozen=True):
    """Everything that can be counted; of spaces and sessions the first 100.

    ``unready``: why no page can be stored; empty when they can. ``session_bytes``: slot bytes that
    engines hold. ``loop_lag_s``: the worst of the last 15 to 30 s. ``latencies``: ``lookup``,
    ``acquire``, ``put``, ``wait`` and ``disk_load``. ``lookups``: of the first 32 models, and of
    all others as ``other``.
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
    waiting_requests: int
    waiting_bytes: int
    unwatched_processes: int
    connections: int
    accepted_connections: int
    counts: dict[str, int]
    latency_bounds_s: list[float]
    latencies: dict[str, Latency]
    lookups: list[Lookups]
    mover: str
    loop_lag_s: float
    events: EventCounts
    ssd: SsdCounts | None
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


class ConfigValue(Answer, frozen=True):
    """One configured value and where it came from; secrets are masked."""

    key: str
    value: Any
    source: str


class Configuration(Answer, frozen=True):
    """Every configured value."""

    values: list[ConfigValue]
