"""Checks of ``kvstore doctor``: do a node and a Conductor know which session is of which engine?"""

import http.client
import json
from collections.abc import Mapping
from typing import Any, Final

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
        engines, nodes = (_answer(url, name, token) for name in ("engines", "nodes"))
        checks = _checks(engines["engines"], nodes["nodes"], nodes.get("membership"))
        counted = f"{url}: {len(engines['engines'])} engines, {len(nodes['nodes'])} nodes"
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
        advice = "check --conductor, and whether it runs; if reading needs a token, give --token"
        return [Check("conductor", "fail", f"{url}: {error}", advice)]
    if not engines["engines"]:
        first = Check("conductor", "warn", counted, "register engines: POST /v1/engines")
    else:
        advice = "see the lines below" if checks else ""
        first = Check("conductor", "warn" if checks else "ok", counted, advice)
    return [first, *checks[:_SHOWN_MAX]]


def _answer(url: str, name: str, token: str) -> dict[str, Any]:
    """The engines or the nodes of a Conductor.

    Raises:
        OSError, ValueError, http.client.HTTPException: no answer, or not a Conductor's.
    """
    status, body = client.send(url, "GET", f"/v1/{name}", token=token, timeout_s=_TIMEOUT_S)
    if status != http.client.OK:
        raise ValueError(f"GET /v1/{name}: status {status}")
    answer: dict[str, Any] = json.loads(body)
    return answer


def _checks(
    engines: list[dict[str, Any]], nodes: list[dict[str, Any]], membership: dict[str, Any] | None
) -> list[Check]:
    """A line for each engine and node that does not count, and for a membership that is away."""
    return [
        *([_membership(membership)] if membership and membership["state"] != "current" else []),
        *(_dead(one) for one in engines if one.get("state") == "dead"),
        *(_engine(one) for one in engines if one.get("gaps")),
        *(_node(one) for one in nodes if one.get("why_not")),
    ]


def _membership(shown: Mapping[str, Any]) -> Check:
    kind = shown["kind"]
    means = f"cluster {shown['cluster']}: {kind} is {shown['state']}: {shown['why']}"
    advice = f"check {kind}, and section {kind} of the Conductor; until then no new node is seen"
    return Check("membership", "warn", means, advice)


def _dead(shown: Mapping[str, Any]) -> Check:
    means = f"it is dead: {shown.get('failures', 'several')} failures in a row; it gets no requests"
    advice = f"check whether {shown['url']} answers; it counts again when it does"
    return Check(f"engine {shown['id']}", "warn", means, advice)


def _engine(shown: Mapping[str, Any]) -> Check:
    means = "; ".join(gap["means"] for gap in shown["gaps"])
    advice = dict.fromkeys(gap["do"] for gap in shown["gaps"])
    return Check(f"engine {shown['id']}", "warn", means, "; ".join(advice))


def _node(shown: Mapping[str, Any]) -> Check:
    return Check(f"node {shown['id']}", "warn", shown["why_not"], shown["do"])
