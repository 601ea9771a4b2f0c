"""Checks of ``kvstore doctor``: do a node and a Conductor know which session is of which engine?"""

import http.client
from typing import Final, TypeVar

import msgspec

from kvstore.config.machine import Check
from kvstore.protocol.counts import NodeStats
from kvstore.server import client
from kvstore.server.environment import conductor_token

_TIMEOUT_S: Final = 3.0
_SHOWN_MAX: Final = 50
"""Engines and nodes of a Conductor that have a line of their own."""
_NAMED: Final = 5
_NAME_ADVICE: Final = (
    "a Conductor cannot find their engines: set the adapter's option `engine` (vLLM: in"
    " kv_connector_extra_config) to the engine's id, and update adapters of an earlier version"
)

_T = TypeVar("_T")


class _Gap(msgspec.Struct, frozen=True):
    """Why an engine's KV does not count, and what ends that."""

    means: str
    do: str


class _Engine(msgspec.Struct, frozen=True):
    """What is shown here of an engine; versions of a Conductor differ in what they tell."""

    id: str
    url: str
    state: str = ""
    failures: int | None = None
    gaps: list[_Gap] = []


class _Engines(msgspec.Struct, frozen=True):
    engines: list[_Engine]


class _Node(msgspec.Struct, frozen=True):
    """What is shown here of a node; ``why_not``: why its pages do not count."""

    id: str
    why_not: str | None = None
    do: str | None = None


class _Membership(msgspec.Struct, frozen=True):
    """The store that names the nodes."""

    kind: str
    cluster: str
    state: str
    why: str


class _Nodes(msgspec.Struct, frozen=True):
    nodes: list[_Node]
    membership: _Membership | None = None


def name_check(stats: NodeStats | None) -> list[Check]:
    """Check that the engines of a node have names; nothing without a node or engines.

    Args:
        stats: the node's statistics; None = no node answers.
    """
    every = stats.sessions if stats is not None else []
    sessions = [one for one in every if not one.peer]
    if not sessions:
        return []
    unnamed = [one for one in sessions if not one.engine]
    if not unnamed:
        return [Check("engine names", "ok", f"all of {len(sessions)} sessions have one")]
    names = ", ".join(sorted({one.name for one in unnamed})[:_NAMED])
    found = f"{len(unnamed)} of {len(sessions)} sessions have none: {names}"
    return [Check("engine names", "warn", found, _NAME_ADVICE)]


def conductor_checks(url: str, token: str) -> list[Check]:
    """Check which engines and nodes of a Conductor do not count, and why.

    Args:
        url: the Conductor's URL.
        token: a token that may read, if a Conductor of this user has not generated one.
    """
    token = conductor_token(url) or token
    try:
        engines = _answer(url, "engines", token, _Engines).engines
        nodes = _answer(url, "nodes", token, _Nodes)
        checks = _checks(engines, nodes)
        counted = f"{url}: {len(engines)} engines, {len(nodes.nodes)} nodes"
    except (OSError, ValueError, http.client.HTTPException) as error:
        advice = "check --conductor, and whether it runs; if reading needs a token, give --token"
        return [Check("conductor", "fail", f"{url}: {error}", advice)]
    if not engines:
        first = Check("conductor", "warn", counted, "register engines: POST /v1/engines")
    else:
        advice = "see the lines below" if checks else ""
        first = Check("conductor", "warn" if checks else "ok", counted, advice)
    return [first, *checks[:_SHOWN_MAX]]


def _answer(url: str, name: str, token: str, kind: type[_T]) -> _T:
    """The engines or the nodes of a Conductor.

    Raises:
        OSError, ValueError, http.client.HTTPException: no answer, or not a Conductor's.
    """
    status, body = client.send(url, "GET", f"/v1/{name}", token=token, timeout_s=_TIMEOUT_S)
    if status != http.client.OK:
        raise ValueError(f"GET /v1/{name}: status {status}")
    return msgspec.json.decode(body, type=kind)


def _checks(engines: list[_Engine], nodes: _Nodes) -> list[Check]:
    """A line for each engine and node that does not count, and for a membership that is away."""
    membership = nodes.membership
    return [
        *([_membership(membership)] if membership and membership.state != "current" else []),
        *(_dead(one) for one in engines if one.state == "dead"),
        *(_engine(one) for one in engines if one.gaps),
        *(_node(one, one.why_not) for one in nodes.nodes if one.why_not),
    ]


def _membership(shown: _Membership) -> Check:
    means = f"cluster {shown.cluster}: {shown.kind} is {shown.state}: {shown.why}"
    where = f"check {shown.kind}, and section {shown.kind} of the Conductor"
    return Check("membership", "warn", means, f"{where}; until then no new node is seen")


def _dead(shown: _Engine) -> Check:
    failures = "several" if shown.failures is None else shown.failures
    means = f"it is dead: {failures} failures in a row; it gets no requests"
    advice = f"check whether {shown.url} answers; it counts again when it does"
    return Check(f"engine {shown.id}", "warn", means, advice)


def _engine(shown: _Engine) -> Check:
    means = "; ".join(gap.means for gap in shown.gaps)
    advice = dict.fromkeys(gap.do for gap in shown.gaps)
    return Check(f"engine {shown.id}", "warn", means, "; ".join(advice))


def _node(shown: _Node, why_not: str) -> Check:
    return Check(f"node {shown.id}", "warn", why_not, shown.do or "")
