"""Who is no node of the cluster: refused by name, and nothing else changes."""

import contextlib
import socket
from typing import Any

import pytest

from kvstore.cluster.records import SCHEME
from kvstore.protocol import wire
from tests.cluster.nodes import files
from tests.cluster_processes.conftest import (
    CLEAN_WAIT_S,
    PAGES_PORT,
    PEERS_PORT,
    ClusterNode,
    ClusterScene,
    fetch,
    is_chain,
    read,
)
from tests.conftest import WaitUntil
from tests.faults import content

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

ANSWER_S = 10.0


def certificates(who: str = "node") -> dict[str, object]:
    found = files(who)
    return {
        "cluster__certificate": found.certificate, "cluster__key": found.key,
        "cluster__authority": found.authority,
    }  # fmt: skip


def test_nodes_with_certificates_meet_at_all_addresses_and_others_are_refused(
    scene: ClusterScene, wait_until: WaitUntil
) -> None:
    a, b, c = scene.add("a", "b", "c")
    nodes = [a, b, c]
    anywhere: dict[str, object] = {"cluster__transfer_listen": "0.0.0.0:0"}
    a.start(nodes, **certificates(), **anywhere)
    b.start(nodes, **certificates(), **anywhere)
    c.start(nodes, **certificates("stranger"))
    scene.meet(a, b)
    keys = content.keys(1, 6)
    assert scene.space(a).put(keys, content.pages(1, 6)).stored == 6
    b.knows(a, 6)
    there = scene.space(b)

    assert fetch(there, keys) == 6
    assert is_chain(1, read(there, keys))

    wait_until(lambda: refused(a, "connection"), CLEAN_WAIT_S)
    assert a.stats()["cluster"]["service"]["sessions"] == ["b"]
    assert not c.stats()["cluster"]["peers"]["a"]["up"]
    assert not follows(c, a)


def faults(node: ClusterNode, other: ClusterNode) -> dict[str, int]:
    """What went wrong with the session of a node with another one."""
    found: dict[str, int] = node.stats()["cluster"]["peers"][other.name]["faults"]
    return found


def follows(node: ClusterNode, other: ClusterNode) -> bool:
    """Whether the directory of a node knows what another one has."""
    peers = node.stats()["cluster"]["directory"]["peers"]
    return other.name in peers and bool(peers[other.name]["current"])


def refused(node: ClusterNode, cause: str) -> int:
    found: dict[str, int] = node.stats()["cluster"]["service"]["refused"]
    return found.get(cause, 0)


def test_a_node_of_another_cluster_is_refused_by_that_name(
    scene: ClusterScene, wait_until: WaitUntil
) -> None:
    a, b = scene.add("a", "b")
    a.start([a, b])
    b.start([a, b], cluster__name="green")

    wait_until(lambda: refused(a, "cluster") and refused(b, "cluster"), CLEAN_WAIT_S)
    wait_until(lambda: faults(a, b).get("refused") and faults(b, a).get("refused"), CLEAN_WAIT_S)

    for node, other in ((a, b), (b, a)):
        told = node.stats()["cluster"]
        assert not told["peers"][other.name]["up"]
        assert not follows(node, other)
        assert told["service"]["sessions"] == []


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"cluster": "green"}, "cluster"),
        ({"scheme": "md5 1"}, "scheme"),
        ({"node": "z"}, "node"),
        ({"node": "a"}, "node"),
        ({"major": 9}, "protocol"),
        ({"minor": 0}, "protocol"),
    ],
)
def test_a_greeting_that_differs_is_refused_by_its_field(
    scene: ClusterScene, fields: dict[str, Any], field: str
) -> None:
    a, b = scene.add("a", "b")
    a.start([a, b])
    hello = wire.PeerHello(
        1, wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR, "blue", "b", b"b" * 16, SCHEME
    )
    for name, value in fields.items():
        setattr(hello, name, value)

    with socket.create_connection((a.host, PEERS_PORT), ANSWER_S) as raw:
        raw.sendall(wire.encode(hello))
        answer = all_of(raw)

    (body,) = wire.FrameReader().feed(answer)
    failure = wire.decode_answer(body)
    assert isinstance(failure, wire.Failure)
    assert failure.field == field
    assert refused(a, field) == 1
    b.start([a, b])
    scene.meet(a, b)


def all_of(raw: socket.socket) -> bytes:
    """What a node says until it closes the connection."""
    found = b""
    try:
        while data := raw.recv(1 << 16):
            found += data
    except ConnectionError:
        pass
    return found


def test_garbage_on_each_port_costs_that_connection_only(scene: ClusterScene) -> None:
    a, b = scene.start("a", "b")
    keys = content.keys(1, 6)
    assert scene.space(a).put(keys, content.pages(1, 6)).stored == 6
    b.knows(a, 6)
    for port in (PEERS_PORT, PAGES_PORT):
        for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n" * 9, b"\xff" * 4096, bytes(4096)):
            with socket.create_connection((a.host, port), ANSWER_S) as raw:
                raw.sendall(garbage)
                with contextlib.suppress(OSError):  # it may have closed the connection already
                    raw.shutdown(socket.SHUT_WR)
                all_of(raw)

    there = scene.space(b)
    assert fetch(there, keys) == 6
    assert is_chain(1, read(there, keys))
    assert a.stats()["cluster"]["service"]["sessions"] == ["b"]


@pytest.mark.parametrize("key", ["listen", "transfer_listen"])
def test_a_node_does_not_start_where_others_cannot_reach_it_safely(
    scene: ClusterScene, key: str
) -> None:
    a, b = scene.add("a", "b")
    setting = f"cluster__{key}"

    told = a.refusal([a, b], **{setting: "0.0.0.0:7999"})
    assert f"cluster.{key}=0.0.0.0:7999 is not loopback" in told
    assert "cluster.certificate" in told

    with socket.socket() as taken:
        taken.bind((a.host, 0))
        taken.listen()
        place = f"{a.host}:{taken.getsockname()[1]}"
        told = a.refusal([a, b], **{setting: place})
    assert f"config: cluster.{key}: cannot listen at tcp://{place}" in told

    told = a.refusal([a, b], **certificates() | {"cluster__authority": "/nowhere"})
    assert "cluster.authority: /nowhere" in told
