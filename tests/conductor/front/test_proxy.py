"""Completions through the Conductor, over real HTTP, with engines that only pretend."""

import asyncio
import json

import pytest

from conductor.routing.policy import POLICIES
from tests.conductor.fakes import FakeEngine, serving, sse, texts
from tests.loops import eventually, in_loop


@in_loop
async def test_a_mixed_engine_serves_alone_and_its_answer_comes_through_unchanged() -> None:
    engine = FakeEngine("e", "mixed")
    async with serving(engine) as client:
        status, answer, headers = await client.complete("hi", top_p=0.5, unknown={"a": [1]})
        assert status == 200
        assert answer["choices"][0]["text"] == "whole from e"
        assert engine.requests == [
            {"model": "m", "prompt": "hi", "top_p": 0.5, "unknown": {"a": [1]}}
        ]
        assert engine.headers[0]["X-Request-Id"] == headers["X-Request-Id"]


@in_loop
async def test_a_stream_is_passed_on_event_by_event_while_the_engine_still_works() -> None:
    engine = FakeEngine("e", "mixed")
    async with serving(engine) as client:
        engine.mid_gate.clear()
        body = {"model": "m", "prompt": "hi", "stream": True}
        async with client.session.post(client.url + "/v1/completions", json=body) as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            first = await response.content.readuntil(b"\n\n")
            assert texts(sse(first.decode())) == ["e:0 "]  # the engine has not gone on yet
            engine.mid_gate.set()
            rest = (await response.read()).decode()
        assert texts(sse(rest)) == ["e:1 ", "e:2 "]
        assert sse(rest)[-1] == "[DONE]"
        assert sse(rest)[-2]["timings"]["restored_tokens"] == 4


@in_loop
async def test_round_robin_gives_each_engine_its_turn() -> None:
    engines = [FakeEngine(name, "mixed") for name in "abc"]
    async with serving(*engines) as client:
        served = [(await client.complete())[1]["choices"][0]["text"][-1] for _ in range(6)]
        assert sorted(served[:3]) == ["a", "b", "c"]
        assert served[:3] == served[3:]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@in_loop
async def test_each_policy_is_chosen_by_its_name_and_serves_pairs_and_single_engines(
    policy: str,
) -> None:
    engines = [FakeEngine("p", "prefill"), FakeEngine("d", "decode"), FakeEngine("x", "mixed")]
    async with serving(*engines, policy={"name": policy}) as client:
        for number in range(3):
            status, _, headers = await client.complete(f"prompt {number}")
            assert status == 200
            decision = await client.decision(headers["X-Request-Id"])
            assert decision["policy"] == policy
            assert decision["attempts"][0]["reason"] == POLICIES[policy].because


@pytest.mark.parametrize("told", ["header", "prompt_cache_key", "user"])
@in_loop
async def test_a_session_is_told_by_a_header_or_a_field_and_served_by_one_engine(told: str) -> None:
    engines = [FakeEngine(name, "mixed") for name in "abc"]
    async with serving(*engines, policy={"name": "session"}) as client:
        used: dict[str, set[str]] = {}
        for number in range(24):
            session = f"s{number % 8}"
            fields = {} if told == "header" else {told: session}
            headers = {"X-Session-Id": session} if told == "header" else {}
            body = {"model": "m", "prompt": "x", **fields}
            _, answer, _ = await client.post("/v1/completions", body, **headers)
            used.setdefault(session, set()).add(answer["choices"][0]["text"])
        assert {len(of_session) for of_session in used.values()} == {1}
        assert len(set.union(*used.values())) > 1


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_pair_gets_one_hand_off_and_its_params_are_relayed_unchanged(stream: bool) -> None:
    p, d = FakeEngine("p", "prefill"), FakeEngine("d", "decode")
    async with serving(p, d) as client:
        status, answer, headers = await client.complete(
            "hi", max_tokens=7, seed=3, stream=stream, stream_options={"include_usage": True}
        )
        assert status == 200
        said = texts(sse(answer)) if stream else [answer["choices"][0]["text"]]
        assert said == (["d:0 ", "d:1 ", "d:2 "] if stream else ["whole from d"])
        original = {
            "model": "m",
            "prompt": "hi",
            "max_tokens": 7,
            "seed": 3,
            "stream": stream,
            "stream_options": {"include_usage": True},
        }
        to_p = {**original, "max_tokens": 1, "stream": False}
        del to_p["stream_options"]
        assert p.requests == [{**to_p, "kv_transfer_params": {"do_remote_decode": True}}]
        assert d.requests == [{**original, "kv_transfer_params": p.transfer()}]
        ids = {engine.headers[0]["X-Request-Id"] for engine in (p, d)}
        assert ids == {headers["X-Request-Id"]}


@in_loop
async def test_the_prefill_engine_is_free_again_once_it_has_answered() -> None:
    p, d = FakeEngine("p", "prefill", max_running=1), FakeEngine("d", "decode")
    async with serving(p, d) as client:
        d.gate.clear()
        requests = [asyncio.create_task(client.complete()) for _ in range(3)]
        await eventually(lambda: d.running == 3, "all three decode at once")
        assert p.running_most == 1
        d.gate.set()
        assert [(await request)[0] for request in requests] == [200] * 3


@in_loop
async def test_an_engine_never_has_more_than_it_said_and_the_rest_waits_in_order() -> None:
    engine = FakeEngine("e", "mixed", max_running=2)
    async with serving(engine) as client:
        engine.gate.clear()
        requests = [asyncio.create_task(client.complete(f"p{i}")) for i in range(5)]
        await eventually(lambda: len(client.conductor.queue) == 3 and engine.running == 2)
        engine.gate.set()
        assert [(await request)[0] for request in requests] == [200] * 5
        assert engine.running_most == 2
        assert len(engine.requests) == 5
        client.conductor.queue.dispatcher.check()


@in_loop
async def test_a_full_queue_is_429_with_retry_after_and_the_others_are_still_served() -> None:
    engine = FakeEngine("e", "mixed", max_running=1)
    async with serving(engine, queue={"waiting_max": 1}) as client:
        engine.gate.clear()
        kept = [asyncio.create_task(client.complete()) for _ in range(2)]
        await eventually(lambda: len(client.conductor.queue) == 1 and engine.running == 1)
        status, answer, headers = await client.complete()
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        assert int(headers["Retry-After"]) >= 1
        engine.gate.set()
        assert [(await request)[0] for request in kept] == [200, 200]


@in_loop
async def test_requests_that_are_still_being_tokenised_count_against_the_bound() -> None:
    engine = FakeEngine("e", "mixed", max_running=1)
    async with serving(
        engine, queue={"waiting_max": 1}, policy={"name": "longest-prefix"}
    ) as client:
        engine.tokenize_gate.clear()
        kept = [asyncio.create_task(client.complete(f"p{i}")) for i in range(2)]
        await eventually(lambda: client.conductor.proxy.active == 2)
        status, _, headers = await client.complete("one more")
        assert status == 429
        assert "Retry-After" in headers
        engine.tokenize_gate.set()
        assert [(await request)[0] for request in kept] == [200, 200]


@in_loop
async def test_a_request_that_waits_too_long_for_an_engine_is_503() -> None:
    engine = FakeEngine("e", "mixed", max_running=1)
    async with serving(engine, queue={"wait_s": 0.05}) as client:
        engine.gate.clear()
        kept = asyncio.create_task(client.complete())
        await eventually(lambda: engine.running == 1)
        status, answer, headers = await client.complete()
        assert (status, answer["error"]["code"]) == (503, "queue_timeout")
        assert "Retry-After" in headers
        engine.gate.set()
        assert (await kept)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_an_engine_that_dies_before_the_first_byte_costs_only_a_try(stream: bool) -> None:
    engines = [FakeEngine("a", "mixed"), FakeEngine("b", "mixed")]
    async with serving(*engines) as client:
        engines[0].broken = "reset"
        for _ in range(2):  # one of the two would begin with the broken engine
            status, answer, headers = await client.complete(stream=stream)
            assert status == 200
            assert "b" in (answer if stream else answer["choices"][0]["text"])
            decision = await client.decision(headers["X-Request-Id"])
            outcomes = [attempt["outcome"] for attempt in decision["attempts"]]
            assert outcomes[-1] == "ok"
        assert len(engines[0].requests) >= 1
        assert len(engines[1].requests) == 2


@in_loop
async def test_a_prefill_engine_that_dies_is_replaced_and_the_pair_starts_again() -> None:
    p1, p2 = FakeEngine("p1", "prefill"), FakeEngine("p2", "prefill")
    d = FakeEngine("d", "decode")
    async with serving(p1, p2, d) as client:
        p1.broken = "reset"
        status, _, headers = await client.complete("x", stream=True)
        assert status == 200
        assert d.requests[0]["kv_transfer_params"]["handoff_id"] == "handoff of p2"
        attempts = (await client.decision(headers["X-Request-Id"]))["attempts"]
        assert [a["prefill"] for a in attempts] == ["p1", "p2"]
        assert "p1" in attempts[0]["outcome"]


@pytest.mark.parametrize("broken", ["midway", "short"])
@in_loop
async def test_an_engine_that_dies_after_the_first_byte_is_an_error_event_never_a_repeat(
    broken: str,
) -> None:
    engines = [FakeEngine("a", "mixed"), FakeEngine("b", "mixed")]
    async with serving(*engines) as client:
        for engine in engines:
            engine.broken = broken
        status, answer, headers = await client.complete(stream=True)
        assert status == 200
        events = sse(answer)
        assert len(texts(events)) == 1
        assert events[-1]["error"]["code"] == "engine_failed"
        assert "[DONE]" not in events
        assert len(engines[0].requests) + len(engines[1].requests) == 1
        decision = await client.decision(headers["X-Request-Id"])
        assert decision["outcome"] == "broken"


@in_loop
async def test_when_no_engine_is_left_the_answer_is_503_with_retry_after() -> None:
    engines = [FakeEngine("a", "mixed"), FakeEngine("b", "mixed")]
    async with serving(*engines) as client:
        for engine in engines:
            await engine.stop()
        status, answer, headers = await client.complete()
        assert (status, answer["error"]["code"]) == (503, "no_engine")
        assert int(headers["Retry-After"]) >= 1
        dead = client.conductor.registry.of_model("m")
        await eventually(lambda: all(engine.health.state == "dead" for engine in dead))
        status, answer, headers = await client.complete()
        assert (status, answer["error"]["code"]) == (503, "no_engine")
        assert "Retry-After" in headers
        assert (await client.get("/readyz"))[0] == 503


@in_loop
async def test_with_only_one_role_left_requests_are_refused() -> None:
    p, d = FakeEngine("p", "prefill"), FakeEngine("d", "decode")
    async with serving(p, d) as client:
        assert (await client.get("/readyz"))[0] == 200
        assert await client.delete("/v1/engines/p") == 204
        status, answer, _ = await client.complete()
        assert status == 503
        assert "only decode engines" in answer["error"]["message"]


@in_loop
async def test_a_busy_engine_is_left_alone_but_stays_healthy() -> None:
    a, b = FakeEngine("a", "mixed"), FakeEngine("b", "mixed")
    async with serving(a, b) as client:
        a.status = 503
        assert [(await client.complete())[0] for _ in range(3)] == [200] * 3
        engine = client.conductor.registry.get("a")
        assert engine is not None
        assert engine.health.state == "alive"


@in_loop
async def test_what_an_engine_says_about_a_bad_request_is_relayed_and_not_retried() -> None:
    engines = [FakeEngine("a", "mixed"), FakeEngine("b", "mixed")]
    async with serving(*engines) as client:
        for engine in engines:
            engine.status = 400
        status, answer, _ = await client.complete()
        assert (status, answer["error"]["message"]) == (400, "as told")
        assert len(engines[0].requests) + len(engines[1].requests) == 1


@in_loop
async def test_a_client_that_goes_away_ends_the_engine_s_work() -> None:
    p, d = FakeEngine("p", "prefill"), FakeEngine("d", "decode")
    async with serving(p, d) as client:
        d.mid_gate.clear()
        body = {"model": "m", "prompt": "hi", "stream": True}
        response = await client.session.post(client.url + "/v1/completions", json=body)
        await response.content.readuntil(b"\n\n")
        response.close()
        await eventually(lambda: d.aborted == 1, "decode was aborted")
        p.gate.clear()
        request = asyncio.create_task(client.complete())
        await eventually(lambda: p.running == 1)
        request.cancel()
        await eventually(lambda: p.aborted == 1, "prefill was aborted")
        await eventually(lambda: client.conductor.proxy.active == 0)
        assert client.conductor.queue.dispatcher.in_flight("p") == 0
        assert client.conductor.queue.dispatcher.in_flight("d") == 0
        assert client.conductor.decisions.newest(1)[0].outcome == "client_gone"


@in_loop
async def test_a_client_that_leaves_the_queue_takes_no_engine() -> None:
    engine = FakeEngine("e", "mixed", max_running=1)
    async with serving(engine) as client:
        engine.gate.clear()
        kept = asyncio.create_task(client.complete())
        await eventually(lambda: engine.running == 1)
        gone = asyncio.create_task(client.complete())
        await eventually(lambda: len(client.conductor.queue) == 1)
        gone.cancel()
        await eventually(lambda: len(client.conductor.queue) == 0)
        engine.gate.set()
        assert (await kept)[0] == 200
        assert len(engine.requests) == 1


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"{", "body"),
        (b"[]", "body"),
        (b"\xff\xfe", "body"),
        (b'{"model": "m"}', "prompt"),
        (b'{"model": "m", "prompt": 5}', "prompt"),
        (b'{"model": "m", "prompt": [1, -2]}', "prompt"),
        (b'{"model": "m", "prompt": ""}', "prompt"),
        (b'{"model": "m", "prompt": []}', "prompt"),
        (b'{"model": 1, "prompt": "x"}', "model"),
        (b'{"model": "m", "prompt": "x", "max_tokens": 0}', "max_tokens"),
        (b'{"model": "m", "prompt": [1], "max_tokens": 9223372036854775808}', "max_tokens"),
        (b'{"model": "m", "prompt": [1], "max_tokens": ' + b"9" * 4_300 + b"}", "max_tokens"),
        (b'{"model": "m", "prompt": "x", "stream": "yes"}', "stream"),
        (b'{"model": "m", "prompt": "x", "n": 2}', "n"),
        (b'{"model": "m", "prompt": "x", "kv_transfer_params": {}}', "kv_transfer_params"),
    ],
)
@in_loop
async def test_a_bad_body_is_400_and_names_the_field(body: bytes, field: str) -> None:
    engine = FakeEngine("e", "mixed")
    async with serving(engine) as client:
        status, answer, _ = await client.post("/v1/completions", body)
        assert status == 400, answer
        assert answer["error"]["param"] == field
        assert answer["error"]["message"].startswith(field)
        assert engine.requests == []


@in_loop
async def test_an_unknown_model_is_404_and_no_engine_at_all_is_503() -> None:
    engine = FakeEngine("e", "mixed")
    async with serving(engine) as client:
        status, answer, _ = await client.complete(model="other")
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert await client.delete("/v1/engines/e") == 204
        status, answer, headers = await client.complete()
        assert status == 503
        assert "POST /v1/engines" in answer["error"]["message"]
        assert "Retry-After" in headers


@in_loop
async def test_a_path_that_is_not_served_says_which_is() -> None:
    async with serving(FakeEngine("e", "mixed")) as client:
        status, answer, _ = await client.post("/v1/responses", {"input": "hi"})
        assert status == 404
        assert "POST to /v1/chat/completions or /v1/completions" in answer["error"]["message"]


@in_loop
async def test_a_request_may_leave_out_the_model_when_there_is_only_one() -> None:
    async with serving(FakeEngine("e", "mixed")) as client:
        assert (await client.post("/v1/completions", {"prompt": "x"}))[0] == 200


@in_loop
async def test_the_end_waits_for_requests_in_flight_and_refuses_new_ones() -> None:
    engine = FakeEngine("e", "mixed")
    async with serving(engine) as client:
        engine.gate.clear()
        kept = asyncio.create_task(client.complete())
        await eventually(lambda: engine.running == 1)
        draining = asyncio.create_task(client.conductor._drain())
        await eventually(lambda: client.conductor.proxy.closing)
        assert (await client.complete())[0] == 503
        assert (await client.get("/readyz"))[0] == 503
        assert not draining.done()
        engine.gate.set()
        assert (await kept)[0] == 200
        await draining


@in_loop
async def test_a_body_beyond_the_limit_is_413() -> None:
    async with serving(FakeEngine("e", "mixed"), http={"body_bytes_max": 1000}) as client:
        status, answer, _ = await client.complete("x" * 2000)
        assert status == 413
        assert json.dumps(answer).startswith('{"error"')
