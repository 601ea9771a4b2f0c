"""Checks of ``kvstore doctor``: can this node and the others of its cluster use each other?"""

import ssl
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from kvstore.cli.stores import running_store_checks, store_checks
from kvstore.cluster.probe import Greeting, Unwilling, Willing, greet, greeting_of, is_open
from kvstore.cluster.tls import client_context, server_context
from kvstore.cluster.ways import reached
from kvstore.config import ServerConfig
from kvstore.config.addresses import Address, is_loopback, read_address
from kvstore.config.cluster import NODES_MAX, ClusterConfig
from kvstore.config.machine import Check
from kvstore.protocol.counts import NodeRow, NodeStats
from kvstore.protocol.errors import ConfigError, ProtocolError, printable, reason
from kvstore.server.answers import ConfigValue
from kvstore.server.nodes import node_list

_EXPIRES_S: Final = 30 * 86_400
"""A certificate that ends sooner is warned of."""
_WILDCARDS: Final = ("0.0.0.0", "::")
_RENEW: Final = "make a new one (docs/cluster.md#certificates) and restart the node"


def peer_checks(
    config: ServerConfig | None, stats: NodeStats | None,
    settings: Sequence[ConfigValue] | None = None,
) -> Iterator[Check]:  # fmt: skip
    """Check the section ``cluster``; nothing if the node is alone by it.

    Args:
        config: of the node; None = only what the running node knows is told.
        stats: statistics of the node, if it runs; None = no node answers.
        settings: settings that the running node reports, for its stores; None = it does not report
            them. Used without a configuration only.
    """
    reported: dict[str, NodeRow] = {}
    if stats is not None:
        reported = {one.name: one for one in node_list(stats).nodes}
    if config is None:
        yield from (_seen(name, row) for name, row in reported.items())
        if stats is not None and stats.cluster is not None:
            yield from running_store_checks(settings)
        return
    yield from _configured(config, reported, runs=stats is not None)


def _configured(
    config: ServerConfig, reported: Mapping[str, NodeRow], *, runs: bool
) -> Iterator[Check]:
    """Check a configuration and the nodes that it names; ``reported``: those of a running node."""
    cluster = config.cluster
    if not cluster.name:
        return
    try:
        client, server = client_context(cluster), server_context(cluster)
    except ConfigError as error:
        yield Check("certificates", "fail", str(error), "correct the files; a node refuses them")
        return
    if client is not None and server is not None:
        yield _certificates(client, server, config.node.name)
    yield from _listeners(cluster)
    if "mooncake" in cluster.transports:
        yield _mooncake(cluster)
    yield from store_checks(config)
    if cluster.membership != "local":
        yield from (_seen(name, row) for name, row in reported.items())
        return
    others = cluster.others(config.node.name)
    if len(others) >= NODES_MAX:
        yield Check("cluster", "fail", f"{len(others) + 1} nodes", f"at most {NODES_MAX} work")
    if not others:
        advice = "name the other nodes in cluster.nodes; until then this one is alone"
        yield Check("cluster", "warn", "cluster.nodes names no other node", advice)
    runs = runs or is_open(read_address(cluster.listen))
    for name, place in others.items():
        if name in reported:
            yield _seen(name, reported[name])
        else:
            yield _node(name, place, client, None if runs else greeting_of(config))


# ---- this node ------------------------------------------------------------------------------


def _certificates(client: ssl.SSLContext, server: ssl.SSLContext, node: str) -> Check:
    """Check this node's certificate as the other nodes do: in a handshake with itself."""
    try:
        found = _own_certificate(client, server)
    except ssl.SSLError as error:
        why = getattr(error, "verify_message", "") or reason(error)
        advice = f"the other nodes refuse it: {_RENEW}"
        return Check("certificates", "fail", f"cluster.certificate: {why}", advice)
    ends_s = min(
        ssl.cert_time_to_seconds(str(one["notAfter"])) for one in (found, *client.get_ca_certs())
    )
    names = sorted(_names(found))
    what = f"signed by the authority; its names: {', '.join(names) or 'none'}"
    if node not in names:
        what += f" (not {node}; names are not compared)"
    left_s = ends_s - datetime.now(UTC).timestamp()
    what += f"; {int(left_s // 86_400)} days left"
    if left_s < _EXPIRES_S:
        return Check(
            "certificates",
            "warn",
            what,
            f"it or the authority's certificate expires soon: {_RENEW}",
        )
    return Check("certificates", "ok", what)


def _own_certificate(client: ssl.SSLContext, server: ssl.SSLContext) -> dict[str, Any]:
    """This node's certificate, verified.

    Raises:
        ssl.SSLError: the authority did not sign it, or it is not valid now.
    """
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(back, there)
    theirs = server.wrap_bio(there, back, server_side=True)
    waiting = [ours, theirs]
    while waiting:
        one = waiting.pop(0)
        try:
            one.do_handshake()
        except ssl.SSLWantReadError:
            waiting.append(one)
    return dict(ours.getpeercert() or {})


def _names(certificate: Mapping[str, Any]) -> set[str]:
    """The names of a certificate: common name, DNS names and addresses."""
    subject = (pair for part in certificate.get("subject", ()) for pair in part)
    found = {value for name, value in subject if name == "commonName"}
    return found | {value for _, value in certificate.get("subjectAltName", ())}


def _listeners(cluster: ClusterConfig) -> Iterator[Check]:
    """Check what the listening addresses mean for who may connect."""
    away = any(not is_loopback(one.host) for one in cluster.others("").values())
    for field in ("listen", "transfer_listen"):
        text = getattr(cluster, field)
        host = read_address(text).host
        name = f"cluster.{field}"
        if host in _WILDCARDS:
            advice = (
                "let a firewall open the port to the other nodes only, or name the address of"
                " their network"
            )
            yield Check(name, "warn", f"{text}: every network of this machine", advice)
        elif is_loopback(host) and away:
            advice = "set an address that the other nodes reach, and certificates"
            yield Check(
                name,
                "warn",
                f"{text}: only this machine can connect, but other nodes are elsewhere",
                advice,
            )
        else:
            yield Check(name, "ok", text)


def _mooncake(cluster: ClusterConfig) -> Check:
    """Say what Mooncake's ports mean."""
    tenants = ", ".join(cluster.rdma_tenants)
    if not tenants:
        advice = "name tenants in cluster.rdma_tenants, or take mooncake out of cluster.transports"
        return Check("mooncake", "warn", "it serves no tenant's pages", advice)
    found = f"whoever reaches ports 15000 to 17000 of any interface reads and writes {tenants}"
    advice = "let a firewall open these ports to the other nodes only"
    return Check("mooncake", "warn", found, advice)


# ---- other nodes ----------------------------------------------------------------------------


def _seen(name: str, row: NodeRow) -> Check:
    """What the running node knows of another one."""
    if row.state == "up":
        found = f"{row.endpoint}: a session, pages over {row.transport or 'no transport'}"
        if not row.current:
            advice = "its pages are misses until the index has read its events"
            return Check(f"node {name}", "warn", f"{found}; {row.index_why}", advice)
        return Check(f"node {name}", "ok", found)
    fault = row.fault
    if fault is None:
        return Check(f"node {name}", "warn", f"{row.endpoint}: no session yet", "ask again")
    if fault.field:
        return _differs(name, fault.field, fault.why)
    found = f"{row.endpoint}: {fault.cause}: {fault.why}"
    return Check(f"node {name}", "warn", found, _ADVICE.get(fault.cause, _ADVICE["closed"]))


def _node(name: str, place: Address, tls: ssl.SSLContext | None, hello: Greeting | None) -> Check:
    """Connect to another node; greet it if a greeting is given."""
    try:
        answer = greet(name, place, tls, hello)
    except ssl.SSLError as error:
        return Check(f"node {name}", "warn", f"{place}: {reason(error)}", _ADVICE["tls"])
    except (OSError, ProtocolError) as error:
        advice = _ADVICE["unreachable" if isinstance(error, OSError) else "protocol"]
        return Check(f"node {name}", "warn", f"{place}: {reason(error)}", advice)
    if answer is None:
        return Check(f"node {name}", "ok", f"{place}: reachable; see kvstore nodes for more")
    return _greeted(name, place, answer)


def _greeted(name: str, place: Address, answer: Willing | Unwilling) -> Check:
    """What the answer to a greeting says."""
    if isinstance(answer, Unwilling):
        return _differs(name, answer.field, answer.why)
    for transport, endpoint in answer.transports.items():
        try:
            at = read_address(reached(endpoint, str(place).rpartition(":")[0]))
        except ValueError as error:
            found = f"{place}: {printable(str(error))}"
            return Check(f"node {name}", "warn", found, _ADVICE["closed"])
        if not is_open(at):
            found = f"{place}: welcome, but {printable(transport)} at {at} does not answer"
            return Check(f"node {name}", "warn", found, _ADVICE["unreachable"])
    found = f"{place}: welcome, protocol {answer.protocol}"
    return Check(f"node {name}", "ok", f"{found}, {printable(', '.join(answer.transports))}")


def _differs(name: str, field: str, why: str) -> Check:
    advice = {
        "cluster": "give both the same cluster.name",
        "node": "cluster.nodes of both must have the node.name of the other",
        "protocol": "update the older one of the two",
        "scheme": "update the older one: they compute keys or digests differently",
    }.get(field, "see the log of that node")
    return Check(f"node {name}", "fail", f"refused: {printable(why)}", advice)


_ADVICE: Final = {
    "unreachable": "does it run, and does a firewall let its cluster.listen and"
    " cluster.transfer_listen through?",
    "silent": "it is stopped or overloaded, or the network loses packets",
    "tls": "its certificate and this one must be of the same authority and not expired",
    "protocol": "the address in cluster.nodes must be its cluster.listen",
    "closed": "see the log of that node",
}
