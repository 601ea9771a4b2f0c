"""Goal: the nodes in a cluster's store are followed without a list, and by hand wins."""

import logging
from contextlib import AbstractAsyncContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest

from conductor.front.cluster import ClusterNodes
from conductor.front.guarding import Guard
from conductor.front.nodes import Nodes
from conductor.service import index_settings
from kvstore.cluster.records import NodeRecord, write_record
from kvstore.events.publisher import EventPublisher
from kvstore.process.faults import Faults
from kvstore.protocol.errors import ConfigError
from kvstore.testing.stores import MemoryRecords, MemoryStore
from tests.conductor.fake_nodes import FakeNode, beside, session_of
from tests.conductor.fakes import Client, configured, like_vllm, serving
from tests.conductor.test_service import LOOPBACK, PROMPT, keys_of, stored
from tests.index.publishers import as_node
from tests.local_index import LocalIndex
from tests.loops import eventually, in_loop

TOKEN = "read-token-of-all-nodes"
BOOTS = {name: name.encode() * 16 for name in "abc"}
BLUE = {"name": "blue", "membership": "etcd"}


def node_of(name: str, **told: object) -> FakeNode:
    return FakeNode(name, **{"boot": BOOTS[name].hex(), "cluster": "blue", **told})


class BlueCluster:
    """The store of cluster ``blue``."""

    def __init__(self) -> None:
        self.records = MemoryRecords(lease_s=60.0)

    def put(self, name: str, admin: str, **fields: Any) -> None:
        record = NodeRecord(
            name=name, boot=BOOTS[name], endpoint="127.0.0.1:1", admin=admin, **fields
        )
        self.records.put(name, write_record(record))

    def conductor(self, *engines: Any, **sections: Any) -> AbstractAsyncContextManager[Client]:
        return serving(
            *engines, store=MemoryStore(self.records),
            **{"cluster": BLUE, "etcd": {"endpoints": ["127.0.0.1:1"]}, **sections},
        )  # fmt: skip


async def shown(client: Client) -> dict[str, Any]:
    """The nodes by id."""
    status, answer = await client.get("/v1/nodes")
    assert status == 200, answer
    return {one["id"]: one for one in answer["nodes"]}


def known(client: Client) -> dict[str, str]:
    """Where each node that has been read comes from."""
    nodes = client.conductor.membership.nodes
    return {node.id: node.source for node in nodes if node.view is not None}


@in_loop
async def test_nodes_are_followed_as_they_appear_in_the_store_and_removed_when_they_leave(
    tmp_path: Path,
) -> None:
    blue, a, b = BlueCluster(), node_of("a"), node_of("b")
    a.token = b.token = TOKEN
    (tmp_path / "token").write_text(TOKEN + "\n")
    cluster = {**BLUE, "read_token_file": str(tmp_path / "token")}
    async with beside(a, b), blue.conductor(cluster=cluster) as client:
        blue.put("a", a.url)
        await eventually(lambda: known(client) == {"a": "membership"})
        blue.put("b", b.url)
        await eventually(lambda: known(client) == {"a": "membership", "b": "membership"})
        answer = (await client.get("/v1/nodes"))[1]
        assert TOKEN not in str(answer)
        assert answer["membership"] == {
            "kind": "etcd", "cluster": "blue", "state": "current", "field": "", "why": "",
            "nodes": ["a", "b"], "unreadable_records": 0,
        }  # fmt: skip
        [one] = [one for one in answer["nodes"] if one["id"] == "b"]
        assert (one["source"], one["cluster"], one["url"]) == ("membership", "blue", b.url)
        text = (await client.get("/metrics"))[1]
        assert 'kvstore_conductor_node_source{node="a",source="membership"} 1.0' in text
        assert 'kvstore_conductor_membership_state{state="current"} 1.0' in text
        assert "kvstore_conductor_membership_nodes 2.0" in text

        assert await client.delete("/v1/nodes/a") == 400
        blue.records.delete("a")
        await eventually(lambda: known(client) == {"b": "membership"})
        assert await client.delete("/v1/nodes/a") == 404
    assert blue.records.common == b"", "the Conductor writes nothing"


@in_loop
async def test_a_node_that_has_moved_is_read_at_its_new_place() -> None:
    blue, old, new = BlueCluster(), node_of("a"), node_of("a", boot="another")
    async with beside(old, new), blue.conductor() as client:
        blue.put("a", old.url)
        await eventually(lambda: known(client) == {"a": "membership"})
        blue.put("a", new.url)
        await eventually(
            lambda: [v.boot for v in client.conductor.membership.nodes.views] == ["another"]
        )
        reads = old.reads
        more = new.reads
        await eventually(lambda: new.reads > more + 2)
        assert old.reads == reads


@in_loop
async def test_what_was_told_stays_while_the_store_is_away(caplog) -> None:
    blue, a = BlueCluster(), node_of("a")
    async with beside(a), blue.conductor() as client:
        blue.put("a", a.url)
        await eventually(lambda: known(client) == {"a": "membership"})
        blue.records.away = True
        with caplog.at_level(logging.WARNING):
            membership = client.conductor.membership.cluster
            await eventually(lambda: membership.state().state == "away")
            reads = a.reads
            await eventually(lambda: a.reads > reads + 2)
        assert known(client) == {"a": "membership"}
        text = (await client.get("/metrics"))[1]
        assert 'kvstore_conductor_membership_state{state="away"} 1.0' in text
        blue.records.away = False
        await eventually(lambda: membership.state().state == "current")
    assert [one for one in caplog.messages if "membership in etcd is away" in one]


@in_loop
async def test_a_node_that_is_registered_by_hand_stays_as_it_was_registered() -> None:
    blue, a, elsewhere = BlueCluster(), node_of("a"), node_of("a", boot="by hand")
    async with beside(a, elsewhere), blue.conductor() as client:
        blue.put("a", a.url)
        await eventually(lambda: known(client) == {"a": "membership"})
        status, answer, _ = await client.operate("/v1/nodes", {"url": elsewhere.url})
        assert (status, answer["source"], answer["url"]) == (201, "registered", elsewhere.url)
        blue.put("b", elsewhere.url)
        await eventually(lambda: "b" in known(client))
        assert (await shown(client))["a"]["url"] == elsewhere.url
        blue.records.delete("a")
        blue.records.delete("b")
        await eventually(lambda: known(client) == {"a": "registered"})
        blue.put("a", a.url)
        assert await client.delete("/v1/nodes/a") == 204
        await eventually(lambda: known(client) == {"a": "membership"})


@in_loop
async def test_a_node_that_is_registered_under_another_name_is_not_followed_twice() -> None:
    blue, a = BlueCluster(), node_of("a")
    async with beside(a), blue.conductor() as client:
        blue.put("a", a.url)
        await eventually(lambda: known(client) == {"a": "membership"})
        status, _, _ = await client.operate("/v1/nodes", {"id": "mine", "url": a.url})
        assert status == 201
        await eventually(lambda: known(client) == {"mine": "registered"})


@in_loop
async def test_a_node_whose_record_cannot_be_used_is_shown_with_what_to_do(caplog) -> None:
    blue, a = BlueCluster(), node_of("a")
    async with beside(a), blue.conductor() as client:
        blue.put("a", "")
        blue.put("b", "unix:///run/kvstore/kvstore.sock.admin")
        blue.put("c", a.url, scheme="md5 0")
        left_out = client.conductor.membership.cluster
        await eventually(lambda: set(left_out.left_out) == {"a", "b", "c"})
        nodes = await shown(client)
        assert "names no admin API" in nodes["a"]["why_not"]
        assert "http.advertise" in nodes["a"]["do"]
        assert "no URL" in nodes["b"]["why_not"]
        assert "computes keys in another way" in nodes["c"]["why_not"]
        assert (known(client), a.reads) == ({}, 0)
        text = (await client.get("/metrics"))[1]
        assert "kvstore_conductor_membership_left_out 3.0" in text
        blue.put("a", a.url)
        await eventually(lambda: known(client) == {"a": "membership"})
        assert set(left_out.left_out) == {"b", "c"}


@in_loop
async def test_a_candidate_shows_what_its_node_could_fetch_from_another_node() -> None:
    blue = BlueCluster()
    with ExitStack() as publishers:
        a, b = (
            publishers.enter_context(
                as_node(
                    EventPublisher(
                        LOOPBACK, LOOPBACK, topic=f"kvstore@{name}@{BOOTS[name].hex()}".encode()
                    ),
                    BOOTS[name].hex(),
                )
            )
            for name in "ab"
        )
        nodes = [
            node_of(name, endpoint=one.bound_endpoint, replay_endpoint=one.bound_replay_endpoint)
            for name, one in (("a", a), ("b", b))
        ]
        nodes[1].sessions = [session_of("e")]
        prefixes = {"name": "longest-prefix"}
        async with beside(*nodes), blue.conductor(like_vllm(), policy=prefixes) as client:
            for name, node in zip("ab", nodes, strict=True):
                blue.put(name, node.url)
            engine = client.conductor.registry.get("e")
            assert engine is not None
            await eventually(lambda: (engine.info.node, engine.info.peers) == ("b", ("a",)))
            await eventually(lambda: client.is_current("node/a") and client.is_current("node/b"))
            a.publish([stored(keys_of(PROMPT)[:3], "CPU")])
            b.publish([stored(keys_of(PROMPT)[:1], "CPU")])
            await eventually(lambda: client.entries == 3)
            await eventually(
                lambda: sum(
                    sum(one.pages.values())
                    for one in client.conductor.index.present().report.workers
                ) == 4
            )  # fmt: skip
            _, _, headers = await client.complete(PROMPT)
            [attempt] = (await client.decision(headers["X-Request-Id"]))["attempts"]
            [candidate] = attempt["candidates"]
            assert (candidate["usable_tokens"], candidate["peer_tokens"]) == (4, 8)

            blue.records.delete("a")
            await eventually(lambda: engine.info.peers == ())


@pytest.mark.parametrize(
    ("sections", "named"),
    [({"cluster": {**BLUE, "read_token_file": "/nowhere"}}, "cluster.read_token_file=/nowhere"),
     ({"etcd": {"endpoints": ["h:1"], "login": "/nowhere"}}, "etcd.login: /nowhere")],
)  # fmt: skip
def test_a_file_that_cannot_be_read_stops_the_start(sections: dict[str, Any], named: str) -> None:
    config = configured(**{"cluster": BLUE, "etcd": {"endpoints": ["h:1"]}, **sections})
    guard = Guard(Faults(logging.getLogger(), ""))
    nodes = Nodes(config, LocalIndex(index_settings(config)), list, guard)
    with pytest.raises(ConfigError, match=named):
        ClusterNodes(config, nodes, guard, None)
