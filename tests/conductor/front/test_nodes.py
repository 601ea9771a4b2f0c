"""Engines and nodes find each other: id, role and URL suffice, and URL and read token of a node."""

import asyncio
from pathlib import Path

import pytest
from aiohttp import web

from kvstore.events.publisher import EventPublisher
from tests.conductor.fake_nodes import FakeNode, beside, session_of
from tests.conductor.fakes import FakeEngine, like_vllm, serving
from tests.conductor.test_service import LOOPBACK, PROMPT, keys_of, stored
from tests.index.publishers import as_node
from tests.loops import eventually, in_loop

READ = "read-token-of-the-node"
SHARD = "cd" * 32


def gaps(shown):
    return [one["gap"] for one in shown["gaps"]]


async def engine_of(client, engine_id="e"):
    status, shown = await client.get(f"/v1/engines/{engine_id}")
    assert status == 200, shown
    return shown


async def node_of(client):
    [shown] = (await client.get("/v1/nodes"))[1]["nodes"]
    return shown


@in_loop
async def test_id_role_and_url_and_the_url_and_token_of_its_node_are_all_that_is_needed() -> None:
    with (
        as_node(EventPublisher(LOOPBACK, LOOPBACK, topic=b"kvstore@n@b1"), "b1") as of_node,
        EventPublisher(LOOPBACK, LOOPBACK, topic=b"kv@b") as of_engine,
    ):
        node = FakeNode(
            "n", endpoint=of_node.bound_endpoint, replay_endpoint=of_node.bound_replay_endpoint
        )
        node.token = READ
        node.sessions = [
            session_of(None),
            session_of(None) | {"name": "peer m", "peer": True},
            session_of(
                "e", shards=[SHARD], events=of_engine.bound_endpoint,
                events_replay=of_engine.bound_replay_endpoint, block_tokens=2,
            ),
        ]  # fmt: skip
        async with (
            beside(node),
            serving(like_vllm(), policy={"name": "longest-prefix"}) as client,
        ):
            assert gaps(await engine_of(client)) == ["no_events", "no_space", "unknown_node"]
            body = {"url": node.url, "read_token": READ}
            status, answer, _ = await client.operate("/v1/nodes", body)
            assert (status, answer["id"], answer["engines"]) == (201, "n", ["e"])
            assert answer["unnamed_sessions"] == 1
            assert READ not in str(answer)

            shown = await engine_of(client)
            assert (shown["model"], shown["node"], shown["page_tokens"]) == ("m", "n", 4)
            assert (shown["spaces"], shown["shards"]) == (["ab" * 32], [SHARD])
            assert (shown["domain"], shown["block_tokens"]) == ("ab" * 32, 2)
            assert shown["events"] == of_engine.bound_endpoint
            await eventually(lambda: client.is_current("node/n"))
            await eventually(lambda: client.is_current("engine/e"))
            assert gaps(await engine_of(client)) == []

            of_node.publish([stored(keys_of(PROMPT)[:3], "CPU")])
            await eventually(lambda: client.entries == 3)
            _, _, headers = await client.complete(PROMPT)
            [attempt] = (await client.decision(headers["X-Request-Id"]))["attempts"]
            assert attempt["predicted_hit_tokens"] == 12
            text = (await client.get("/metrics"))[1]
            assert 'kvstore_conductor_engine_gap{engine="e",gap="no_space"} 0.0' in text
            assert 'kvstore_conductor_node_readable{node="n"} 1.0' in text
            assert 'kvstore_conductor_node_unnamed_sessions{node="n"} 1.0' in text


@in_loop
async def test_a_session_may_come_after_both_have_registered_and_may_leave_again(caplog) -> None:
    node = FakeNode("n")
    async with beside(node), serving(like_vllm()) as client:
        await client.operate("/v1/nodes", {"url": node.url})
        registry = client.conductor.registry
        engine = registry.get("e")
        assert engine is not None
        reads = node.reads
        await eventually(lambda: node.reads > reads + 2)
        assert gaps(await engine_of(client)) == ["no_events", "no_space", "unknown_node"]

        node.sessions = [session_of("e/dp1", page_tokens=8, events_bind="tcp://127.0.0.1:5558")]
        await eventually(lambda: engine.info.page_tokens == 8)
        assert (engine.info.node, engine.info.events_bind) == ("n", "tcp://127.0.0.1:5558")
        assert [rank.rank for rank in engine.info.ranks] == [1]
        assert gaps(await engine_of(client)) == ["events_down", "node_events_down"]
        node.sessions = []
        reads = node.reads
        await eventually(lambda: node.reads > reads + 2)
        assert engine.info.page_tokens == 8, "an engine that restarts is what it was"
        node.sessions = [session_of("e/dp1") | {"spaces": []}]
        reads = node.reads
        await eventually(lambda: node.reads > reads + 2)
        assert engine.info.page_tokens == 8, "until it has opened its space"
        node.sessions = [session_of("e", "ef" * 32, 16)]
        await eventually(lambda: engine.info.domain == "ef" * 32)
    said = [r.message for r in caplog.records if "so pages on nodes do not count" in r.message]
    assert len(said) == 1, "a gap is logged when it appears"
    assert "option `engine`" in said[0]


@in_loop
async def test_an_engine_that_cannot_be_asked_for_its_model_must_be_told() -> None:
    engine = await like_vllm(model="served").start()
    engine.keyed = True
    async with serving() as client:
        body = {"id": "e", "role": "mixed", "url": engine.url}
        status, answer, _ = await client.operate("/v1/engines", body)
        assert (status, answer["error"]["param"]) == (502, "url")
        assert "status 401" in answer["error"]["message"]
        assert answer["error"]["message"].count("engine e") == 1
        assert "register it with `model`" in answer["error"]["message"]
        assert (await client.operate("/v1/engines", {**body, "model": "m"}))[0] == 201
        engine.keyed = False
        assert (await client.operate("/v1/engines", body))[1]["model"] == "served"
    await engine.stop()


@in_loop
async def test_what_the_registration_or_the_engine_says_is_not_overridden_by_a_session() -> None:
    node = FakeNode("n")
    node.sessions = [session_of("e", page_tokens=8, events="ipc:///run/of-session")]
    plain, other = FakeEngine("e", "mixed", page_tokens=16), like_vllm("o")
    async with beside(node), serving(plain, other) as client:
        await client.operate("/v1/nodes", {"url": node.url})
        shown = await engine_of(client)
        assert (shown["page_tokens"], shown["node"]) == (16, "n")
        assert shown["events"] == "ipc:///run/of-session"
        node.sessions.append(session_of("o", page_tokens=8))
        body = {
            "id": "o", "role": "mixed", "url": other.url, "page_tokens": 2,
            "events_bind": "tcp://127.0.0.1:5557", "space": "12" * 32, "node": "n",
        }  # fmt: skip
        assert (await client.operate("/v1/engines", body))[0] == 201
        reads = node.reads
        await eventually(lambda: node.reads > reads + 2)
        shown = await engine_of(client, "o")
        assert (shown["page_tokens"], shown["domain"]) == (2, "12" * 32)
        assert (shown["events"], shown["events_bind"]) == (None, "tcp://127.0.0.1:5557")
        assert shown["spaces"] == [], "the session is of another space"


@in_loop
async def test_the_registration_may_add_a_replay_endpoint_to_what_the_engine_says() -> None:
    engine = await FakeEngine("e", "mixed", events="ipc:///run/e").start()
    async with serving() as client:
        body = {"id": "e", "role": "mixed", "url": engine.url, "events_replay": "ipc:///run/r"}
        _, answer, _ = await client.operate("/v1/engines", body)
        assert (answer["events"], answer["events_replay"]) == ("ipc:///run/e", "ipc:///run/r")
        engine.described["events_replay"] = "udp://x"
        del body["events_replay"]
        status, answer, _ = await client.operate("/v1/engines", body)
        assert (status, answer["error"]["param"]) == (400, "events_replay")
    await engine.stop()


@in_loop
async def test_an_endpoint_of_a_session_that_is_none_is_left_out() -> None:
    node = FakeNode("n")
    node.sessions = [session_of("e", events="udp://nowhere")]
    async with beside(node), serving(like_vllm()) as client:
        await client.operate("/v1/nodes", {"url": node.url})
        shown = await engine_of(client)
        assert (shown["node"], shown["events"], gaps(shown)[0]) == ("n", None, "no_events")


@in_loop
async def test_an_engine_whose_name_is_at_two_nodes_says_so() -> None:
    one, two = FakeNode("one"), FakeNode("two")
    one.sessions = two.sessions = [session_of("e")]
    async with beside(one, two), serving(like_vllm()) as client:
        for node in (one, two):
            await client.operate("/v1/nodes", {"url": node.url})
        shown = await engine_of(client)
        assert "ambiguous_node" in gaps(shown)
        [gap] = [one for one in shown["gaps"] if one["gap"] == "ambiguous_node"]
        assert "a name of its own" in gap["do"]


@in_loop
async def test_a_node_that_restarts_under_its_name_is_followed_at_its_new_endpoint(caplog) -> None:
    with (
        as_node(EventPublisher(LOOPBACK, LOOPBACK, topic=b"kvstore@n@b1"), "b1") as first,
        as_node(EventPublisher(LOOPBACK, LOOPBACK, topic=b"kvstore@n@b2"), "b2") as second,
    ):
        node = FakeNode(
            "n", endpoint=first.bound_endpoint, replay_endpoint=first.bound_replay_endpoint
        )
        async with beside(node), serving(like_vllm()) as client:
            await client.operate("/v1/nodes", {"url": node.url})
            await eventually(lambda: client.is_current("node/n"))
            node.status = 503
            await eventually(lambda: node_is_away(client))
            shown = await node_of(client)
            assert "status 503" in shown["why_not"]
            assert shown["events"] == first.bound_endpoint, "what it said last stays"
            node.told |= {
                "boot": "b2", "endpoint": second.bound_endpoint,
                "replay_endpoint": second.bound_replay_endpoint,
            }  # fmt: skip
            node.status = 200
            await eventually(lambda: at(client) == second.bound_endpoint)
            await eventually(lambda: client.is_current("node/n"))
            assert (await node_of(client))["boot"] == "b2"


def at(client):
    follower = client.followed("node/n")
    return follower and follower.source.endpoint


def node_is_away(client):
    [node] = client.conductor.membership.nodes
    return node.trouble


@in_loop
async def test_a_node_over_tcp_that_needs_a_follow_token_says_what_it_lacks() -> None:
    node = FakeNode("n", endpoint="tcp://0.0.0.0:7781", follow_token=True)
    async with beside(node), serving() as client:
        _, answer, _ = await client.operate("/v1/nodes", {"url": node.url})
        assert answer["events"] == "tcp://127.0.0.1:7781"
        assert "events_token" in answer["do"]
        assert client.followed("node/n") is None
        body = {"url": node.url, "events_token": READ}
        _, answer, _ = await client.operate("/v1/nodes", body)
        assert answer["why_not"] is None
        assert client.followed("node/n").source.token == READ


@in_loop
async def test_a_node_with_its_events_switched_off_says_so() -> None:
    node = FakeNode("n")
    async with beside(node), serving() as client:
        _, answer, _ = await client.operate("/v1/nodes", {"url": node.url})
        assert "set events.endpoint" in answer["do"]


@in_loop
async def test_a_node_may_register_by_its_admin_socket(tmp_path) -> None:
    node = FakeNode("n")
    await node.start(str(tmp_path / "a.sock"))
    try:
        async with serving() as client:
            status, answer, _ = await client.operate("/v1/nodes", {"url": node.url})
            assert (status, answer["id"]) == (201, "n")
    finally:
        await node.stop()


@in_loop
async def test_a_socket_that_speaks_no_http_is_refused_with_the_name_of_the_one_that_does(
    tmp_path: Path,
) -> None:
    async def no_http(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x95\x16\x01 a frame is over the limit\r\n\r\n")
        writer.close()

    async with await asyncio.start_unix_server(no_http, tmp_path / "s"), serving() as client:
        status, answer, _ = await client.operate("/v1/nodes", {"url": f"unix://{tmp_path}/s"})
    assert (status, answer["error"]["code"]) == (502, "node_unreachable")
    assert "its answer is no HTTP" in answer["error"]["message"]


@in_loop
async def test_a_node_that_cannot_be_read_is_refused_unless_it_is_named() -> None:
    node = FakeNode("n")
    node.token = READ
    async with beside(node), serving() as client:
        body = {"url": node.url, "read_token": "another-token-than-that"}
        status, answer, _ = await client.operate("/v1/nodes", body)
        assert (status, answer["error"]["param"]) == (400, "read_token")
        node.status = 404
        status, answer, _ = await client.operate("/v1/nodes", {"url": node.url})
        assert "register it with `id` and `events`" in answer["error"]["message"]
        node.status = 500
        status, answer, _ = await client.operate("/v1/nodes", {"url": node.url})
        assert (status, answer["error"]["code"]) == (502, "node_unreachable")
        assert (await client.get("/v1/nodes"))[1]["nodes"] == []
        body = {"id": "mine", "url": node.url, "read_token": READ}
        status, answer, _ = await client.operate("/v1/nodes", body)
        assert status == 201
        assert "status 500" in answer["why_not"]
        node.status = 200
        await eventually(lambda: not node_is_away(client))
        assert (await node_of(client))["id"] == "mine", "the id of the registration counts"


@in_loop
async def test_two_nodes_of_one_name_need_an_id_each() -> None:
    one, two = FakeNode("local"), FakeNode("local")
    async with beside(one, two), serving() as client:
        assert (await client.operate("/v1/nodes", {"url": one.url}))[0] == 201
        assert (await client.operate("/v1/nodes", {"url": one.url}))[0] == 201
        status, answer, _ = await client.operate("/v1/nodes", {"url": two.url})
        assert (status, answer["error"]["param"]) == (400, "id")
        body = {"id": "second", "url": two.url}
        assert (await client.operate("/v1/nodes", body))[0] == 201
        await eventually(lambda: two.reads > 2)
        assert await client.delete("/v1/nodes/second") == 204
        assert [node.id for node in client.conductor.membership.nodes] == ["local"]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"node": "n"}, "GET /v1/events: Object missing required field `boot`"),
        ({"node": "n\n"}, "GET /v1/events: "),
        ({"endpoint": "udp://x"}, "GET /v1/events: events:"),
    ],
)
def test_an_answer_that_cannot_be_a_nodes_is_refused_in_one_line(answer, said) -> None:
    @in_loop
    async def refused() -> None:
        node = FakeNode("n")
        node.told = answer if answer == {"node": "n"} else {**node.told, **answer}
        async with beside(node), serving() as client:
            status, refusal, _ = await client.operate("/v1/nodes", {"url": node.url})
            assert status == 502
            assert said in refusal["error"]["message"]
            assert "\n" not in refusal["error"]["message"]

    refused()


@in_loop
async def test_a_node_that_is_silent_is_given_up_after_the_deadline() -> None:
    node = FakeNode("n")
    async with beside(node), serving(health={"probe_timeout_s": 0.05}) as client:
        node.gate.clear()
        status, refusal, _ = await client.operate("/v1/nodes", {"url": node.url})
        assert (status, "no answer in time" in refusal["error"]["message"]) == (502, True)
        node.gate.set()


@in_loop
async def test_all_parts_of_a_long_listing_are_read() -> None:
    node = FakeNode("n")
    node.sessions = [session_of(f"other{number}") for number in range(230)] + [session_of("e")]
    async with beside(node), serving(like_vllm()) as client:
        await client.operate("/v1/nodes", {"url": node.url})
        assert (await engine_of(client))["node"] == "n"


class EndlessNode(FakeNode):
    """Always says that there are more sessions, and shows none."""

    async def _sessions(self, http: web.Request) -> web.Response:
        return web.json_response({"sessions": [], "next": int(http.query["cursor"]) + 1})


@in_loop
async def test_a_listing_that_does_not_end_is_given_up() -> None:
    node = EndlessNode("n")
    async with beside(node), serving() as client:
        async with asyncio.timeout(30):
            status, refusal, _ = await client.operate("/v1/nodes", {"url": node.url})
        assert (status, "do not go on" in refusal["error"]["message"]) == (502, True)


@in_loop
async def test_a_node_at_another_url_is_not_followed_where_the_former_one_was() -> None:
    with as_node(EventPublisher(LOOPBACK, LOOPBACK, topic=b"kvstore@n@b1"), "b1") as events:
        node = FakeNode(
            "n", endpoint=events.bound_endpoint, replay_endpoint=events.bound_replay_endpoint
        )
        async with beside(node), serving() as client:
            await client.operate("/v1/nodes", {"id": "n", "url": node.url})
            await eventually(lambda: client.is_current("node/n"))
            await client.operate("/v1/nodes", {"id": "n", "url": "http://127.0.0.1:1"})
            await eventually(lambda: client.conductor.index.present().worker("node/n") is None)
            [known] = client.conductor.membership.nodes
            assert known.view is None
            assert known.trouble


@in_loop
async def test_configured_nodes_are_taken_up_when_they_answer() -> None:
    node = FakeNode("n")
    async with beside(node):
        node.status = 500
        async with serving(nodes=[{"url": node.url}]) as client:
            nodes = client.conductor.membership.nodes
            await eventually(lambda: True)
            node.status = 200
            await eventually(lambda: "n" in nodes)


@in_loop
async def test_an_entry_for_a_node_says_what_it_lacks() -> None:
    async with serving() as client:
        for body, field in (
            ({"id": "n"}, "url"),
            ({"events": "ipc:///a"}, "id"),
            ({"url": "ftp://x"}, "url"),
            ({"url": "unix://relative"}, "url"),
            ({"url": "http://u:p@h:1"}, "url"),
            ({"url": "http://h:1", "read_token": "a b"}, "read_token"),
        ):
            status, answer, _ = await client.operate("/v1/nodes", body)
            assert (status, answer["error"]["param"]) == (400, field), body
            assert "u:p" not in str(answer)
