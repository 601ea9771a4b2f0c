"""Goal: a chat goes the way of a completion, and an engine judges all that is the engine's."""

import asyncio
import json
from typing import Any

import msgspec
import pytest

from conductor.front.completions import Route, parse_completion
from conductor.front.openai import BadRequestError
from tests.conductor.fakes import FakeEngine, serving, sse
from tests.loops import eventually, in_loop

LONGEST = {"name": "longest-prefix"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"a": [1, None]}}}]
PICTURE = {"type": "image_url", "image_url": {"url": "http://pictures/1.png"}}


def deltas(events: list[Any]) -> list[str]:
    return [
        one["choices"][0]["delta"]["content"]
        for one in events
        if isinstance(one, dict) and one.get("choices")
    ]


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_an_engine_gets_a_chat_as_it_was_sent_and_its_answer_comes_through(
    stream: bool,
) -> None:
    engine = FakeEngine("e", "mixed")
    fields: dict[str, Any] = {
        "tools": TOOLS, "tool_choice": "auto", "response_format": {"type": "json_object"},
        "max_completion_tokens": 7, "unknown": {"a": [1]}, "stream": stream,
    }  # fmt: skip
    if stream:
        fields["stream_options"] = {"include_usage": True}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}, PICTURE]},
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
        {"role": "strange", "content": 17},
    ]
    async with serving(engine) as client:
        body = {"model": "m", "messages": messages, **fields}
        status, answer, headers = await client.post("/v1/chat/completions", body)
        assert status == 200
        assert engine.requests == [body]
        assert engine.paths == ["/v1/chat/completions"]
        assert engine.headers[0]["X-Request-Id"] == headers["X-Request-Id"]
        if stream:
            assert deltas(sse(answer)) == ["e:0 ", "e:1 ", "e:2 "]
            assert sse(answer)[-1] == "[DONE]"
        else:
            assert answer["choices"][0]["message"]["content"] == "whole from e"
        decision = await client.decision(headers["X-Request-Id"])
        assert (decision["route"], decision["stream"]) == ("/v1/chat/completions", stream)
        assert decision["ttft_s"] > 0
        assert decision["attempts"][0]["served"]["prompt_tokens"] == 9


@pytest.mark.parametrize("asks", [False, True])
@in_loop
async def test_usage_is_asked_of_every_stream_and_hidden_from_a_client_that_did_not_ask(
    asks: bool,
) -> None:
    engine = FakeEngine("e", "mixed")
    engine.like_openai = True
    async with serving(engine) as client:
        options = {"stream_options": {"include_usage": True}} if asks else {}
        status, answer, headers = await client.chat(stream=True, **options)
        assert status == 200
        assert engine.requests[0]["stream_options"] == {"include_usage": True}
        events = sse(answer)
        assert deltas(events) == ["e:0 ", "e:1 ", "e:2 "]
        assert any(isinstance(one, dict) and one.get("usage") for one in events) == asks
        decision = await client.decision(headers["X-Request-Id"])
        assert decision["attempts"][0]["served"]["completion_tokens"] == 3


@in_loop
async def test_a_pair_gets_a_chat_of_one_token_and_then_the_chat() -> None:
    p, d = FakeEngine("p", "prefill"), FakeEngine("d", "decode")
    async with serving(p, d) as client:
        status, answer, _ = await client.chat(max_completion_tokens=7, seed=3)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "whole from d")
        assert p.paths == d.paths == ["/v1/chat/completions"]
        [to_p], [to_d] = p.requests, d.requests
        assert (to_p["max_completion_tokens"], to_p["max_tokens"], to_p["seed"]) == (1, 1, 3)
        assert to_p["messages"] == to_d["messages"] == [{"role": "user", "content": "hi"}]
        assert (to_d["max_completion_tokens"], "max_tokens" in to_d) == (7, False)
        assert to_d["kv_transfer_params"] == p.transfer()


@in_loop
async def test_an_engine_renders_the_messages_once_and_the_prefix_decides() -> None:
    engine = FakeEngine("e", "mixed")
    async with serving(engine, policy=LONGEST) as client:
        fields = {
            "tools": TOOLS, "tool_choice": "auto", "add_generation_prompt": False,
            "continue_final_message": True, "temperature": 0.5, "chat_template": None,
        }  # fmt: skip
        for _ in range(2):
            status, _, headers = await client.chat("hello", **fields)
            assert status == 200
        assert engine.rendered == [
            {
                "model": "m", "messages": [{"role": "user", "content": "hello"}], "tools": TOOLS,
                "add_generation_prompt": False, "continue_final_message": True,
            }
        ]  # fmt: skip
        decision = await client.decision(headers["X-Request-Id"])
        assert decision["prompt_tokens"] == len("hello\n")
        assert (await client.chat("hello", **{**fields, "tools": TOOLS * 2}))[0] == 200
        assert len(engine.rendered) == 2, "other tools are another prompt"


@in_loop
async def test_messages_of_a_late_or_refusing_engine_are_routed_by_load() -> None:
    engine = FakeEngine("e", "mixed")
    async with serving(engine, policy=LONGEST, deadline={"tokenize_s": 0.05}) as client:
        engine.tokenize_gate.clear()
        status, _, headers = await client.chat("late")
        assert status == 200
        assert (await client.decision(headers["X-Request-Id"]))["prompt_tokens"] is None
        engine.tokenize_gate.set()
        engine.tokenize_status = 400
        status, _, headers = await client.chat("refused")
        assert status == 200
        assert (await client.decision(headers["X-Request-Id"]))["prompt_tokens"] is None
        engine_now = client.conductor.registry.get("e")
        assert engine_now is not None


@pytest.mark.parametrize(
    "content", [[PICTURE], ["a", PICTURE], [{"type": "input_audio"}], [{"image_url": {}}], 17, {}]
)
@in_loop
async def test_content_that_is_no_text_is_relayed_and_not_rendered(content: object) -> None:
    engine = FakeEngine("e", "mixed")
    async with serving(engine, policy=LONGEST) as client:
        assert (await client.chat(content))[0] == 200
        assert engine.rendered == []
        assert engine.requests[0]["messages"][0]["content"] == content


TEXTS = [
    "x", None, [], ["x"], [{"type": "text", "text": "x"}], [{"text": "x"}],
    [{"type": "refusal", "refusal": "no"}, {"type": "thinking", "thinking": "..."}],
]  # fmt: skip


@pytest.mark.parametrize("content", TEXTS)
def test_contents_of_text_are_rendered_as_they_are(content: object) -> None:
    messages = [{"role": "user", "content": content}]
    chat = parse_completion(Route.CHAT, json.dumps({"messages": messages}).encode())
    assert chat.rendered is not None
    assert json.loads(msgspec.json.encode(chat.rendered)) == {"messages": messages}


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({"documents": [{"text": "a"}]}, {"documents": [{"text": "a"}]}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": 0, "x": 1}},
            {"reasoning_effort": "low", "enable_thinking": 0, "x": 1},
        ),
        ({"chat_template_kwargs": {"x": 1}}, {"x": 1}),
        ({"reasoning_effort": None, "documents": None}, None),
    ],
)
def test_what_tokenize_has_no_field_for_goes_to_the_template_as_vllm_passes_it(
    fields: dict[str, object], kwargs: object
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    chat = parse_completion(Route.CHAT, json.dumps(body).encode())
    assert chat.rendered is not None
    assert json.loads(msgspec.json.encode(chat.rendered)).get("chat_template_kwargs") == kwargs


def test_arguments_of_a_template_that_are_none_leave_the_prompt_unknown() -> None:
    body = {"messages": [{}], "reasoning_effort": "low", "chat_template_kwargs": 5}
    assert parse_completion(Route.CHAT, json.dumps(body).encode()).rendered is None


def test_a_completion_s_own_choice_of_special_tokens_is_part_of_its_prompt() -> None:
    body = {"prompt": "x", "add_special_tokens": False, "echo": True}
    asked = parse_completion(Route.COMPLETIONS, json.dumps(body).encode()).rendered
    assert json.loads(msgspec.json.encode(asked)) == {"prompt": "x", "add_special_tokens": False}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{}], "model": 1}, "model"),
        ({"messages": [{}], "max_tokens": 0}, "max_tokens"),
        ({"messages": [{}], "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": [{}], "stream": "yes"}, "stream"),
        ({"messages": [{}], "n": 2}, "n"),
        ({"messages": [{}], "kv_transfer_params": {"x": 1}}, "kv_transfer_params"),
    ],
)
@in_loop
async def test_a_bad_chat_is_400_in_openai_s_format_and_names_the_field(
    body: dict[str, object], field: str
) -> None:
    engine = FakeEngine("e", "mixed")
    async with serving(engine) as client:
        status, answer, _ = await client.post("/v1/chat/completions", body)
        assert status == 400, answer
        assert answer["error"]["param"] == field
        assert answer["error"]["type"] == "invalid_request_error"
        assert engine.requests == []


def test_bodies_that_are_no_json_are_bad_requests() -> None:
    for raw in (b"{", b"[]", b"\xff", b'{"messages": [' + b"[" * 5_000):
        with pytest.raises(BadRequestError):
            parse_completion(Route.CHAT, raw)


@in_loop
async def test_chats_wait_in_the_same_queue_and_a_full_one_is_429() -> None:
    engine = FakeEngine("e", "mixed", max_running=1)
    async with serving(engine, queue={"waiting_max": 1}) as client:
        engine.gate.clear()
        kept = [asyncio.create_task(client.chat()), asyncio.create_task(client.complete())]
        await eventually(lambda: len(client.conductor.queue) == 1 and engine.running == 1)
        status, answer, headers = await client.chat()
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        assert int(headers["Retry-After"]) >= 1
        engine.gate.set()
        assert [(await one)[0] for one in kept] == [200, 200]


@in_loop
async def test_admission_counts_the_longest_answer_that_a_chat_allows() -> None:
    engine = FakeEngine("e", "mixed")
    sections = {"admission": {"mode": "prediction"}, "policy": {"name": "earliest-first-token"}}
    async with serving(engine, **sections) as client:
        for fields in ({"max_completion_tokens": 40, "max_tokens": 9_000}, {"max_tokens": 40}):
            _, _, headers = await client.chat(**fields)
            judgement = (await client.decision(headers["X-Request-Id"]))["judgement"]
            assert judgement["output_tokens"] <= 40


@in_loop
async def test_an_engine_that_dies_costs_a_chat_only_a_try_and_one_that_refuses_is_relayed() -> (
    None
):
    engines = [FakeEngine("a", "mixed"), FakeEngine("b", "mixed")]
    async with serving(*engines) as client:
        engines[0].broken = "reset"
        for _ in range(2):
            status, answer, _ = await client.chat()
            assert (status, answer["choices"][0]["message"]["content"]) == (200, "whole from b")
        engines[1].status = 400
        status, answer, _ = await client.chat()
        assert (status, answer["error"]["message"]) == (400, "as told")


@in_loop
async def test_the_route_for_tokens_takes_messages_as_engines_do() -> None:
    engine = FakeEngine("e", "mixed")
    async with serving(engine) as client:
        messages = [{"role": "user", "content": "hi"}]
        body = {"model": "m", "messages": messages, "add_generation_prompt": False}
        status, answer, _ = await client.post("/tokenize", body)
        assert (status, bytes(answer["tokens"])) == (200, b"hi\n")
        assert engine.rendered == [body]
        status, answer, _ = await client.post("/tokenize", {"model": "m"})
        assert (status, answer["error"]["param"]) == (400, "prompt")
