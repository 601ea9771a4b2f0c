"""The node's answers to operations of its admin process; the JSON of the admin API."""

from typing import Any, Literal

from kvstore.protocol.counts import Answer, DirectoryState, Joined, WearCounts
from kvstore.protocol.layout import Layout

Value = int | float | bool | str | None
Member = Literal["off", "local", "joining", "joined", "away", "refused"]


class ErrorBody(Answer, frozen=True):
    """Why a request was refused; ``field`` is empty if no single field is wrong."""

    code: str
    message: str
    field: str


class ErrorAnswer(Answer, frozen=True):
    """The body of every answer that is not a success."""

    error: ErrorBody


class Health(Answer, frozen=True):
    """The node answers."""

    status: Literal["ok"] = "ok"


class Readiness(Answer, frozen=True):
    """The node has memory to store pages in.

    ``withheld_bytes``: memory that clients of the previous run still map. ``ssd``: ``off``,
    ``ready`` or ``degraded``. ``unwatched_processes``: engine processes whose exit the node cannot
    detect. ``cluster``: ``off``, ``joined`` = it has sessions with all other nodes, ``partly`` =
    with some, ``alone`` = with none; it serves its own pages in any case. ``membership``: ``off``,
    ``local`` = a list in its configuration; else whether it is one of the nodes that etcd or Redis
    knows: ``joining`` = not yet, ``joined``, ``away`` = the store does not answer, ``refused``.
    ``directory``: ``off``, ``current`` = this node finds the pages of all nodes that it has a
    session with, and they find its own, ``degraded`` = not so, for example because the Redis of the
    directory does not answer: pages of other nodes are misses.
    ``registered_bytes``: memory that other nodes can read through ``mooncake``,
    ``registered_huge_bytes`` of it in huge pages.
    """

    withheld_bytes: int
    ssd: str
    unwatched_processes: int
    cluster: Joined
    membership: Member
    directory: DirectoryState
    registered_bytes: int = 0
    registered_huge_bytes: int = 0
    status: Literal["ready"] = "ready"


# Spaces, pages, sessions


class ShardRow(Answer, frozen=True):
    """One shard of a space, see ``kvstore.protocol.page.ShardSpec``."""

    layout: Layout
    layers: tuple[int, int]
    heads: tuple[int, int]
    group: str
    window_pages: int
    page_bytes: int


class SpaceRow(Answer, frozen=True):
    """One space; a limit of 0 bytes means no limit."""

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
    """A part of the list of spaces; ``next`` is the cursor of the next part, None at the end."""

    spaces: list[SpaceRow]
    next: int | None
    total: int


class PageShard(Answer, frozen=True):
    """The page of one shard; ``digest`` is None while it is being written."""

    state: Literal["ready", "writing"]
    tiers: list[str]
    bytes: int
    digest: str | None


class PageRow(Answer, frozen=True):
    """The pages of one key; ages in seconds, None = unknown or never."""

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
    """One key; ``pins``: number of operators' pins that cover it."""

    space: str
    pins: int
    read_once: bool
    first_children: list[str]


class PageTokens(Answer, frozen=True):
    """The token ids of one page; None = not given, too many for the page, or for its record."""

    key: str
    depth: int
    tokens: list[int] | None


class PromptPart(Answer, frozen=True):
    """Consecutive pages; the last one is the requested page."""

    space: str
    prompt: list[PageTokens]


class PageList(Answer, frozen=True):
    """A part of a list of pages; ``next`` is the cursor of the next part, None at the end."""

    pages: list[PageRow]
    next: str | None
    total: int | None = None


class ProcessRow(Answer, frozen=True):
    """One process of an engine.

    ``watched``: the node will detect its exit. ``lost``: its connection broke, and its exit was not
    detected.
    """

    pid: int
    watched: bool
    lost: bool
    leases: int
    expired_leases: int
    puts: int


class EngineRow(Answer, frozen=True):
    """The engine of a session, as its adapter says; see ``kvstore.protocol.page.EngineLabel``.

    ``events`` and ``events_replay``: where followers connect; ``events_bind``: where they must
    listen, because the engine connects. ``block_tokens``: tokens of one of its blocks. None =
    unknown.
    """

    name: str
    events: str | None
    events_bind: str | None
    events_replay: str | None
    block_tokens: int | None


class OpenedSpaceRow(Answer, frozen=True):
    """A space that a session has opened; ``shards``: hex digests of the shards it opened.

    ``windows``: of shards of which a hit needs the last pages only, their number.
    """

    space: str
    model: str
    page_tokens: int
    scope: str
    shards: list[str]
    windows: dict[str, int]


class SessionRow(Answer, frozen=True):
    """One process group of an engine, and the resources it holds.

    ``engine`` is None if the session has no engine's name. ``peer``: it is that of another node of
    the cluster, which reads pages here, and of no engine. ``spaces`` has the first ones, in the
    order in which they were opened; ``spaces_total`` is how many there are.
    """

    name: str
    engine: EngineRow | None
    peer: bool
    spaces: list[OpenedSpaceRow]
    spaces_total: int
    tenant: str
    used_bytes: int
    quota_bytes: int
    prefill_s_per_token: float
    processes: list[ProcessRow]


class SessionList(Answer, frozen=True):
    """A part of the list of sessions; ``next`` is the cursor of the next part, None at the end."""

    sessions: list[SessionRow]
    next: int | None
    total: int


class EventSource(Answer, frozen=True):
    """Where the node publishes its KV events.

    ``boot`` and ``topic`` change at every start. ``endpoint`` and ``replay_endpoint`` are None if
    they are off. ``follow_token``: followers over TCP must send ``events.follow_token``.
    ``tokens``: events have the token ids of pages. ``cluster``: name of the cluster whose other
    nodes' pages this one can use; empty = it is alone.
    """

    node: str
    boot: str
    topic: str
    endpoint: str | None
    replay_endpoint: str | None
    follow_token: bool
    tokens: bool
    cluster: str


# Explanations


class PageSizes(Answer, frozen=True):
    """Tokens per page: in the requested space (with its label), and in all spaces."""

    space: str | None
    page_tokens: int | None
    sizes: list[int]


class Run(Answer, frozen=True):
    """A space that has leading pages of a chain."""

    space: str
    pages: int


class Runs(Answer, frozen=True):
    """The spaces with the most leading pages; all have the same number."""

    runs: list[Run]


# Pins, limits, policies


class Pinned(Answer, frozen=True):
    """A new pin."""

    pin: int
    pages: int
    bytes: int
    tier: str


class Unpinned(Answer, frozen=True):
    """A removed pin."""

    pin: int
    pages: int
    bytes: int


class PinRow(Answer, frozen=True):
    """One pin; ``ends_in_s`` None = it lasts until it is removed."""

    pin: int
    space: str
    key: str
    tier: str
    pages: int
    bytes: int
    ends_in_s: float | None


class PinList(Answer, frozen=True):
    """All pins, and the used part of the budgets."""

    pins: list[PinRow]
    used_bytes: int
    budget_bytes: int
    ssd_used_bytes: int
    ssd_budget_bytes: int


class ConversationRow(Answer, frozen=True):
    """One conversation whose pages are kept for ``ends_in_s`` more seconds.

    ``gave_way_pages``: those that it has lost to a tenant or a space that keeps less.
    """

    conversation: str
    space: str
    tier: str
    pages: int
    bytes: int
    gave_way_pages: int
    ends_in_s: float


class ConversationList(Answer, frozen=True):
    """All of them, and the used part of the budgets; a page that several share counts once."""

    conversations: list[ConversationRow]
    used_bytes: int
    budget_bytes: int
    ssd_used_bytes: int
    ssd_budget_bytes: int


class KeptPages(Answer, frozen=True):
    """How many leading pages of the chain are kept, how long, and why the others are not.

    ``cause``: empty = all are; ``missing``, ``bytes``, ``budget``, ``quota``, ``conversations`` or
    ``disk``. ``ends_in_s``: what was asked for, or ``admin.conversations_s_max`` if that is less.
    """

    conversation: str
    pages: int
    cause: str
    ends_in_s: float


class ConversationEnded(Answer, frozen=True):
    """How many pages it kept; 0 = it was not known."""

    conversation: str
    pages: int


class QuotaRow(Answer, frozen=True):
    """The limits of a space in a tier, and the bytes it uses there."""

    space: str
    tier: str
    quota_bytes: int
    reserved_bytes: int
    used_bytes: int


class QuotaList(Answer, frozen=True):
    """All limits."""

    quotas: list[QuotaRow]


class SsdPolicy(Answer, frozen=True):
    """When pages are written to the SSDs and synced, and which pages are admitted."""

    write: str
    sync: str
    admission: str
    wear: WearCounts


class Policy(Answer, frozen=True):
    """``name``: the policy in use; ``configured``: that of the next start; ``ssd``: if any."""

    name: str
    known: list[str]
    configured: str
    ssd: SsdPolicy | None = None


class PolicySet(Policy, frozen=True, kw_only=True):
    """The present policies, and the previous eviction policy."""

    previous: str


# Jobs


class JobFault(Answer, frozen=True):
    """Why a job failed."""

    code: str
    message: str


class JobRow(Answer, frozen=True):
    """One job: ``done`` steps of ``total`` (an estimate), and its results so far."""

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
    """Jobs, newest first."""

    jobs: list[JobRow]


class ConfigValue(Answer, frozen=True):
    """One setting with its value and its source; secrets are masked."""

    key: str
    value: Any
    source: str


class Configuration(Answer, frozen=True):
    """All settings."""

    values: list[ConfigValue]
