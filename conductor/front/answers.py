"""The answers of the Conductor's admin routes."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType, field

from conductor.advice.advise import Advice
from conductor.routing.decisions import Decision
from conductor.routing.engines import EngineInfo, Health
from conductor.routing.prefixes import MediumMatch
from kvstore.cluster.watched import WatchState
from kvstore.index.control import IndexReport


class AdminAnswer(Struct, frozen=True, kw_only=True, gc=False):
    """Base of all answers; they contain no cycles, so the garbage collector can skip them."""


class GapRow(AdminAnswer, frozen=True, kw_only=True):
    """Why an engine's KV does not count when requests are routed.

    Attributes:
        gap: its name (:class:`conductor.routing.joining.Gap`).
        means: what it means, for people.
        do: what ends it.
    """

    gap: str
    means: str
    do: str


class OthersRow(AdminAnswer, frozen=True, kw_only=True):
    """Requests at an engine that this Conductor did not send; estimates, so fractions.

    Attributes:
        running: requests that the engine computes.
        waiting: requests that it has not begun.
    """

    running: float
    waiting: float


class EngineRow(EngineInfo, frozen=True, kw_only=True):
    """An engine: its properties and its present state.

    Attributes:
        state: its health.
        failures: failures in a row.
        in_flight: requests that this Conductor has sent there and that have not ended.
        others: requests of others; None = the engine's metrics do not tell.
        gaps: why its KV does not count, entirely or in part.
    """

    state: Health
    failures: int
    in_flight: int
    others: OthersRow | None
    gaps: list[GapRow]


class RegisteredEngines(AdminAnswer, frozen=True, kw_only=True):
    """Answers ``GET /v1/engines``."""

    engines: list[EngineRow]


class NodeRow(AdminAnswer, frozen=True, kw_only=True):
    """A node of the store.

    Attributes:
        id: its id.
        source: ``registered`` = in the configuration or by request; ``membership`` = by the store
            of its cluster.
        cluster: name of its cluster; None = not known yet.
        url: its admin API, or None.
        events: endpoint of its events, or None.
        events_replay: endpoint for missed events, or None.
        boot: id of its present boot; None = not known.
        engines: names of the engines with sessions there, sorted.
        unnamed_sessions: sessions whose engine has no name; None = not known.
        why_not: why its pages do not count; None = they do.
        do: what ends that.
    """

    id: str
    source: str
    cluster: str | None = None
    url: str | None = None
    events: str | None = None
    events_replay: str | None = None
    boot: str | None = None
    engines: list[str] = field(default_factory=list)
    unnamed_sessions: int | None = None
    why_not: str | None = None
    do: str | None = None


class MembershipState(AdminAnswer, frozen=True, kw_only=True):
    """The store from which the nodes of the cluster are read.

    Attributes:
        kind: ``etcd`` or ``redis``.
        cluster: name of the cluster.
        state: ``current``, ``connecting`` or ``away``: its last answer stays valid.
        field: the configured file that the store rejects; empty = another reason.
        why: what keeps it from being current.
        nodes: ids of the nodes that it names, sorted.
        unreadable_records: records that cannot be read.
    """

    kind: str
    cluster: str
    state: WatchState
    field: str
    why: str
    nodes: list[str]
    unreadable_records: int


class FollowedNodes(AdminAnswer, frozen=True, kw_only=True):
    """Answers ``GET /v1/nodes``; ``membership`` is None without a store."""

    nodes: list[NodeRow]
    membership: MembershipState | None


class IndexState(IndexReport, frozen=True, kw_only=True, tag=False):
    """Answers ``GET /v1/index``: the last report of the index process.

    Attributes:
        up: whether that process serves.
        restarts: times that it was started again.
        faults: its faults by cause.
    """

    up: bool
    restarts: int
    faults: dict[str, int]


class PromptMatch(AdminAnswer, frozen=True, kw_only=True):
    """The prefix of one prompt at each worker.

    Attributes:
        keys: number of keys that were asked for; left out if tokens were.
        prompt_tokens: number of tokens that were asked for; left out if keys were.
        matches: the prefix at each worker, medium by medium.
    """

    keys: int | UnsetType = UNSET
    prompt_tokens: int | UnsetType = UNSET
    matches: list[MediumMatch]


class Matches(AdminAnswer, frozen=True, kw_only=True):
    """Answers ``POST /v1/index/match`` for several prompts, in their order."""

    prompts: list[PromptMatch]


class ModelAdvice(AdminAnswer, frozen=True, kw_only=True):
    """Answers ``GET /v1/advice``, by model."""

    models: dict[str, Advice]


class Decisions(AdminAnswer, frozen=True, kw_only=True):
    """Answers ``GET /v1/decisions``, the newest first."""

    decisions: list[Decision]


class ListedModel(AdminAnswer, frozen=True, kw_only=True):
    """A model or a LoRA adapter, as OpenAI's API lists it; ``parent``: the adapter's model."""

    id: str
    object: Literal["model"] = "model"
    parent: str | UnsetType = UNSET


class Models(AdminAnswer, frozen=True, kw_only=True):
    """Answers ``GET /v1/models``."""

    object: Literal["list"] = "list"
    data: list[ListedModel]
