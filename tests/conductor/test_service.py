"""Everything around completions: engines, nodes, decisions, metrics, health, the command."""

import signal
import sys

import numpy as np
import pytest

from conductor.config import load_conductor
from conductor.service import main
from kvstore.config import show
from kvstore.events.publisher import EventPublisher, StoredEvent
from kvstore.protocol.errors import ConfigError
from kvstore.protocol.page import PrefixKeys, page_keys
from tests.conductor.fakes import FakeEngine, serving
from tests.index.publishers import as_node
from tests.loops import eventually, in_loop

LOOPBACK = "tcp://127.0.0.1:*"
SPACE = "ab" * 32
PROMPT = "the quick brown fox"  # 19 bytes, 4 full pages of 4 tokens


def keys_of(prompt: str) -> PrefixKeys:
    return page_keys(np.frombuffer(prompt.encode(), dtype=np.uint8), 4)


def stored(keys: PrefixKeys, medium: str = "GPU") -> StoredEvent:
    return StoredEvent(
        block_hashes=[bytes(key) for key in keys],
        parent_block_hash=keys.parent or None,
        token_ids=[],
        block_size=4,
        medium=medium,
        space=SPACE,
        shard=0,
        shard_digest="cd" * 8,
    )


@in_loop
async def test_a_request_goes_where_its_prefix_is_and_the_decision_says_why() -> None:
    with EventPublisher(LOOPBACK, LOOPBACK, topic=b"kv-events@b@aa") as publisher:
        a = FakeEngine("a", "mixed")
        b = FakeEngine(
            "b",
            "mixed",
            events=publisher.bound_endpoint,
            events_replay=publisher.bound_replay_endpoint,
        )
        async with serving(a, b, policy={"name": "longest-prefix"}) as client:
            publisher.publish([stored(keys_of(PROMPT)[:3])])
            await eventually(lambda: client.entries == 3)
            await eventually(lambda: client.is_current("engine/b"))
            status, _, headers = await client.complete(PROMPT)
            assert status == 200
            assert (await client.complete(PROMPT))[0] == 200
            assert (len(a.requests), len(b.requests)) == (0, 2)
            assert a.tokenized + b.tokenized == 1  # the second time it was remembered

            decision = await client.decision(headers["X-Request-Id"])
            assert decision["policy"] == "longest-prefix"
            assert decision["prompt_tokens"] == len(PROMPT)
            [attempt] = decision["attempts"]
            assert attempt["reason"] == "longest usable prefix, then least load"
            assert attempt["predicted_hit_tokens"] == 12
            numbers = {c["engine"]: c for c in attempt["candidates"]}
            assert (numbers["a"]["usable_tokens"], numbers["b"]["usable_tokens"]) == (0, 12)
            assert numbers["a"]["verdict"] == "passed over"
            assert numbers["b"]["verdict"] == "chosen to serve alone"
            assert attempt["served"]["restored_tokens"] == 4
            assert attempt["served"]["cached_tokens"] == 1
            assert 0 < decision["conductor_s"] <= decision["ttft_s"] <= decision["total_s"]
            assert (decision["status"], decision["outcome"]) == (200, "ok")


@in_loop
async def test_pages_on_a_node_count_for_the_engines_that_read_from_it() -> None:
    with as_node(EventPublisher(LOOPBACK, LOOPBACK, topic=b"kvstore@n1@aa"), "aa") as publisher:
        p1 = FakeEngine("p1", "prefill", node="n1")
        p2 = FakeEngine("p2", "prefill", node="n2")
        d = FakeEngine("d", "decode")
        async with serving(p2, p1, d, policy={"name": "longest-prefix"}) as client:
            node = {
                "id": "n1",
                "events": publisher.bound_endpoint,
                "events_replay": publisher.bound_replay_endpoint,
            }
            assert (await client.operate("/v1/nodes", node))[0] == 201
            [shown] = (await client.get("/v1/nodes"))[1]["nodes"]
            assert {**shown, **node, "why_not": None} == shown
            publisher.publish([stored(keys_of(PROMPT)[:2], "CPU")])
            await eventually(lambda: client.entries == 2)
            await eventually(lambda: client.is_current("node/n1"))
            status, _, headers = await client.complete(list(PROMPT.encode()))
            assert (status, len(p1.requests), p1.tokenized + p2.tokenized) == (200, 1, 0)
            [attempt] = (await client.decision(headers["X-Request-Id"]))["attempts"]
            numbers = {c["engine"]: c["node_tokens"] for c in attempt["candidates"]}
            assert numbers == {"p1": 8, "p2": 0, "d": 0}
            assert attempt["prefilled"]["restored_tokens"] == 4
            assert await client.delete("/v1/nodes/n1") == 204
            assert await client.delete("/v1/nodes/n1") == 404
            assert client.conductor.index.present().worker("node/n1") is None


@in_loop
async def test_without_tokens_a_request_is_routed_all_the_same() -> None:
    engine = FakeEngine("e", "mixed")
    engine.tokenize_status = 500
    async with serving(engine, policy={"name": "longest-prefix"}) as client:
        status, _, headers = await client.complete(PROMPT)
        assert status == 200
        assert (await client.decision(headers["X-Request-Id"]))["prompt_tokens"] is None


@in_loop
async def test_decisions_are_kept_newest_first_within_a_bound() -> None:
    async with serving(FakeEngine("e", "mixed"), decisions={"kept": 3}) as client:
        for number in range(5):
            header = {"X-Request-Id": f"r{number}"}
            status, _, headers = await client.post("/v1/completions", {"prompt": "x"}, **header)
            assert (status, headers["X-Request-Id"]) == (200, f"r{number}")
        decisions = (await client.get("/v1/decisions?limit=2"))[1]["decisions"]
        assert [d["id"] for d in decisions] == ["r4", "r3"]
        assert len((await client.get("/v1/decisions"))[1]["decisions"]) == 3
        assert (await client.get("/v1/decisions/r1"))[0] == 404
        for limit in ("0", "-1", "x", "1001"):
            status, answer = await client.get(f"/v1/decisions?limit={limit}")
            assert (status, answer["error"]["param"]) == (400, "limit")


@in_loop
async def test_an_id_of_the_client_that_is_none_is_replaced() -> None:
    engine = FakeEngine("e", "mixed")
    async with serving(engine) as client:
        bad = {"X-Request-Id": "../../etc?x y"}
        _, _, headers = await client.post("/v1/completions", {"prompt": "x"}, **bad)
        assert headers["X-Request-Id"] != bad["X-Request-Id"]
        assert (await client.get(f"/v1/decisions/{headers['X-Request-Id']}"))[0] == 200


@in_loop
async def test_engines_can_be_registered_listed_and_removed() -> None:
    engine = await FakeEngine("e", "mixed", max_running=3).start()
    async with serving() as client:
        assert (await client.get("/readyz"))[0] == 503
        assert (await client.get("/health"))[0] == 200
        await client.register(engine)
        assert (await client.get("/readyz"))[0] == 200
        assert (await client.get("/v1/models"))[1]["data"] == [{"id": "m", "object": "model"}]
        [shown] = (await client.get("/v1/engines"))[1]["engines"]
        assert (shown["id"], shown["state"], shown["max_running"]) == ("e", "alive", 3)
        assert (await client.get("/v1/engines/e"))[1] == shown
        status, answer, _ = await client.post("/tokenize", {"prompt": "ab"})
        assert (status, answer["tokens"]) == (200, [97, 98])
        assert await client.delete("/v1/engines/e") == 204
        assert await client.delete("/v1/engines/e") == 404
        assert (await client.get("/v1/engines/e"))[0] == 404
        assert (await client.post("/tokenize", {"prompt": "ab"}))[0] == 503
    await engine.stop()


@in_loop
async def test_a_registration_that_cannot_be_is_refused_and_names_the_field() -> None:
    engine = await FakeEngine("e", "prefill").start()
    async with serving() as client:
        good = {"id": "e", "role": "prefill", "url": engine.url}
        for change, field in (
            ({"id": ""}, "id"),
            ({"role": "other"}, "role"),
            ({"role": "decode"}, "role"),
            ({"url": "ftp://x"}, "url"),
            ({"url": f"{engine.url}/path"}, "url"),
            ({"max_running": 0}, "max_running"),
            ({"unknown": 1}, "unknown"),
            ({"space": "xyz"}, "space"),
        ):
            status, answer, _ = await client.operate("/v1/engines", {**good, **change})
            assert (status, answer["error"]["param"]) == (400, field), change
        status, answer, _ = await client.operate("/v1/engines", {"id": "e", "role": "prefill"})
        assert (status, answer["error"]["param"]) == (400, "url")
        await engine.stop()
        status, answer, _ = await client.operate("/v1/engines", good)
        assert (status, answer["error"]["param"]) == (502, "url")
        assert (await client.get("/v1/engines"))[1] == {"engines": []}


@in_loop
async def test_engines_that_are_all_due_at_once_are_probed_again_after_the_usual_pause() -> None:
    first, second = FakeEngine("e1", "mixed"), FakeEngine("e2", "mixed")
    health = {"backoff_s_max": 3600.0}  # a probe that is under way is not due for so long
    async with serving(first, second, health=health) as client:
        for engine in client.conductor.registry:
            engine.health.probe_at = 0.0
        client.conductor.membership._wake.set()
        before = first.probed, second.probed
        await eventually(lambda: first.probed > before[0] + 3, "the first engine")
        await eventually(lambda: second.probed > before[1] + 3, "the second engine")


@in_loop
async def test_a_dead_engine_is_revived_by_a_probe_and_by_registering_again() -> None:
    engine = FakeEngine("e", "mixed")
    async with serving(engine) as client:
        known = client.conductor.registry.get("e")
        assert known is not None
        engine.healthy = False
        await eventually(lambda: known.health.state == "dead", "missed probes")
        assert (await client.complete())[0] == 503
        await client.register(engine)
        assert known.health.state == "alive"
        await eventually(lambda: known.health.state == "dead")
        engine.healthy = True
        await eventually(lambda: known.health.state == "alive", "a probe went well")
        assert (await client.complete())[0] == 200


@in_loop
async def test_registering_again_changes_nothing_that_has_not_changed() -> None:
    with EventPublisher(LOOPBACK, LOOPBACK, topic=b"kv-events@e@aa") as publisher:
        engine = FakeEngine(
            "e",
            "mixed",
            events=publisher.bound_endpoint,
            events_replay=publisher.bound_replay_endpoint,
        )
        async with serving(engine) as client:
            publisher.publish([stored(keys_of(PROMPT))])
            await eventually(lambda: client.entries == 4)
            follower = client.followed("engine/e")
            await client.register(engine)
            assert client.followed("engine/e") is follower
            assert client.entries == 4
            engine.described["events_replay"] = None
            await client.register(engine)
            assert client.followed("engine/e") is not follower


@in_loop
async def test_configured_engines_are_taken_up_when_they_answer() -> None:
    engine = await FakeEngine("e", "mixed").start()
    tree = {"engines": [{"id": "e", "role": "mixed", "url": engine.url}]}
    async with serving(**tree) as client:
        await eventually(lambda: client.conductor.registry.can_serve())
        assert (await client.complete())[0] == 200
    await engine.stop()


@in_loop
async def test_the_metrics_tell_what_happened() -> None:
    a, b = FakeEngine("a", "mixed"), FakeEngine("b", "mixed")
    async with serving(a, b) as client:
        a.broken = "reset"
        for _ in range(2):
            assert (await client.complete(PROMPT))[0] == 200
        assert (await client.post("/v1/completions", b"{"))[0] == 400
        text = (await client.get("/metrics"))[1]
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))

        def value(name: str) -> float:
            return float(lines[f"kvstore_conductor_{name}"])

        assert value('requests_total{outcome="ok",status="200"}') == 2
        assert value('requests_total{outcome="invalid",status="400"}') == 1
        assert value("retries_total") >= 1
        assert value('engine_failures_total{engine="a"}') >= 1
        assert value('decisions_total{plan="alone",policy="round-robin"}') >= 3
        assert value("hit_tokens_measured_total") == 10
        assert value("ttft_seconds_count") == 2
        assert value("queue_length") == 0
        states = [
            value(f'engine_state{{engine="b",role="mixed",state="{s}"}}')
            for s in ("alive", "suspect", "dead")
        ]
        assert states == [1, 0, 0]
        assert value("index_entries") == 0
        assert "kvstore_conductor_loop_lag_seconds" in lines


def test_an_unknown_key_or_policy_is_refused_and_named(tmp_path) -> None:
    path = tmp_path / "conductor.toml"
    path.write_text(
        '[queue]\nwaiting_max = 5\n[[engines]]\nid = "a"\nrole = "mixed"\n'
        'url = "http://127.0.0.1:1"\n'
    )
    environ = {"KVSTORE_CONDUCTOR__QUEUE__TRIES": "2", "KVSTORE__HOST__PREFAULT": "false"}
    loaded = load_conductor(path, environ, ["queue.wait_s=7"])
    queue = loaded.config.queue
    assert (queue.waiting_max, queue.tries, queue.wait_s) == (5, 2, 7.0)
    assert loaded.config.engines[0].role == "mixed"
    assert "waiting_max = 5" in show(loaded)
    with pytest.raises(ConfigError, match=r"--set queue.waiting.*unknown key queue.waiting"):
        load_conductor(None, {}, ["queue.waiting=1"])
    with pytest.raises(ConfigError, match="KVSTORE_CONDUCTOR__QUEUE__TRIES"):
        load_conductor(None, {"KVSTORE_CONDUCTOR__QUEUE__TRIES": "0"})
    with pytest.raises(ConfigError, match=r"--set policy.name: policy: name: 'best' is not one of"):
        load_conductor(None, {}, ["policy.name=best"])


def test_the_command_refuses_a_bad_configuration_with_status_2(capsys) -> None:
    assert main(["--set", "nothing.here=1"]) == 2
    assert "unknown key nothing" in capsys.readouterr().err
    assert main(["--policy", "best", "--port", "0"]) == 2
    assert "--set policy.name" in capsys.readouterr().err
    assert main(["--print-config", "--policy", "least-loaded"]) == 0
    assert 'name = "least-loaded"  # --set policy.name' in capsys.readouterr().out


def test_the_command_says_where_it_listens_and_ends_at_sigterm(spawn) -> None:
    args = [sys.executable, "-m", "conductor.service", "--port", "0", "--policy", "round-robin"]
    process = spawn(args, ready=r"^listening on (http://127\.0\.0\.1:\d+)$")
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    assert "Traceback" not in process.stderr
