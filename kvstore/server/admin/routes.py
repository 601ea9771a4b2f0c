"""The table of all routes; ``/openapi.json`` is generated from it."""

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from kvstore.protocol import counts
from kvstore.protocol.explanation import Explanation
from kvstore.server import answers, operations
from kvstore.server.admin.access import Role

BODY_BYTES_MAX: Final = 1 << 20
"""Maximum body; larger than the longest list of keys of an operation."""
PROMPT_BYTES_MAX: Final = 32 << 20
"""Maximum body of a prompt; larger than the longest prompt of :class:`Question`."""


class Question(operations.Operation, frozen=True):
    """Explain why a key, or the tokens of a prompt, are a hit or a miss.

    Give either ``key``, or ``tokens`` from the beginning of the prompt; ``shard`` is a shard of
    ``space``.
    """

    key: operations.Name | None = None
    tokens: Annotated[list[int], Meta(max_length=operations.TOKENS_MAX)] | None = None
    space: operations.Name | None = None
    shard: operations.ShardNumber | None = None


class ShowMetrics(operations.Operation, frozen=True):
    """Show the metrics for Prometheus."""


class ShowConfiguration(operations.Operation, frozen=True):
    """Show all settings with their sources; secrets are masked."""


@dataclass(frozen=True)
class Route:
    """One route.

    Attributes:
        method: HTTP method.
        path: the path; parts in braces are fields of ``asks``; ``{job:number}`` is a number.
        asks: type of the request: its query or body, and the parts of its path.
        gives: type of the answer's JSON; None = the answer is not JSON.
        role: role needed for the request; None = no role.
        status: status code of a success.
        prompts: whether the answer shows token ids of prompts.
        rows: name of the list in the answer, for listings made of several answers of the node.
        body_bytes_max: maximum size of the body.
    """

    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    asks: type[operations.Operation]
    gives: Any
    role: Role | None = "read"
    status: int = 200
    prompts: bool = False
    rows: str = ""
    body_bytes_max: int = BODY_BYTES_MAX

    @property
    def has_body(self) -> bool:
        """Whether the request is in the body."""
        return self.method in ("POST", "PUT")


ROUTES: Final = (
    Route("GET", "/healthz", operations.PingNode, answers.Health, None),
    Route("GET", "/readyz", operations.ShowReadiness, answers.Readiness, None),
    Route("GET", "/metrics", ShowMetrics, None),
    Route("GET", "/v1/stats", operations.ShowStats, counts.NodeStats),
    Route("GET", "/v1/spaces", operations.ListSpaces, answers.SpaceList, rows="spaces"),
    Route("GET", "/v1/pages", operations.ListPages, answers.PageList, rows="pages"),
    Route("GET", "/v1/pages/{space}/{key}", operations.ShowPage, answers.PageDetail),
    Route(
        "GET",
        "/v1/pages/{space}/{key}/tokens",
        operations.ShowTokens,
        answers.PromptPart,
        "operate",
        prompts=True,
    ),
    Route("GET", "/v1/tree", operations.ListTree, answers.PageList, rows="pages"),
    Route("GET", "/v1/sessions", operations.ListSessions, answers.SessionList, rows="sessions"),
    Route("GET", "/v1/events", operations.ShowEvents, answers.EventSource),
    Route("GET", "/v1/nodes", operations.ListNodes, counts.NodeList),
    Route("GET", "/v1/tiers", operations.ListTiers, counts.TierList),
    Route("GET", "/v1/config", ShowConfiguration, answers.Configuration),
    Route("GET", "/v1/policy", operations.ShowPolicy, answers.Policy),
    Route("GET", "/v1/pins", operations.ListPins, answers.PinList),
    Route("GET", "/v1/conversations", operations.ListConversations, answers.ConversationList),
    Route("GET", "/v1/quotas", operations.ListQuotas, answers.QuotaList),
    Route("GET", "/v1/jobs", operations.ListJobs, answers.JobList),
    Route("GET", "/v1/jobs/{job:number}", operations.ShowJob, answers.JobRow),
    Route("POST", "/v1/explain", Question, Explanation, body_bytes_max=PROMPT_BYTES_MAX),
    Route("POST", "/v1/pins", operations.PinPages, answers.Pinned, "operate"),
    Route("DELETE", "/v1/pins/{pin:number}", operations.Unpin, answers.Unpinned, "operate"),
    Route("POST", "/v1/conversations", operations.KeepPages, answers.KeptPages, "operate"),
    Route(
        "POST",
        "/v1/conversations/end",
        operations.EndConversation,
        answers.ConversationEnded,
        "operate",
    ),
    Route("POST", "/v1/evict", operations.Evict, answers.JobRow, "operate", 202),
    Route("POST", "/v1/clear", operations.Clear, answers.JobRow, "operate", 202),
    Route("POST", "/v1/verify", operations.Verify, answers.JobRow, "operate", 202),
    Route("POST", "/v1/prefetch", operations.PrefetchPages, answers.JobRow, "operate", 202),
    Route("POST", "/v1/move", operations.MovePages, answers.JobRow, "operate", 202),
    Route("POST", "/v1/replicate", operations.ReplicatePages, answers.JobRow, "operate", 202),
    Route("POST", "/v1/move-to-node", operations.MoveToNode, answers.JobRow, "operate", 202),
    Route("POST", "/v1/drain", operations.DrainNode, answers.JobRow, "operate", 202),
    Route("PUT", "/v1/quotas/{space}", operations.SetLimits, answers.JobRow, "operate", 202),
    Route("PUT", "/v1/policy", operations.SetPolicy, answers.PolicySet, "operate"),
    Route("DELETE", "/v1/jobs/{job:number}", operations.CancelJob, answers.JobRow, "operate"),
)
