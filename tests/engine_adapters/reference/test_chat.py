"""Goal: a chat is the completion of what the documented template makes of its messages."""

import math
from typing import Any

import pytest

from tests.engine_adapters.reference.test_http import events_of, scenario, service

MESSAGES = [
    {"role": "system", "content": "You know pages, slots and leases. " * 3},
    {"role": "user", "content": [{"type": "text", "text": "Tell me "}, "more", {"text": "!"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "ignored"}]},
    {"role": "user", "content": "Go on."},
]
TOOLS = [{"type": "function", "function": {"name": "look"}}]
TEXT = (
    f"<|system|>\n{MESSAGES[0]['content']}\n<|user|>\nTell me more!\n<|assistant|>\n\n"
    "<|user|>\nGo on.\n"
)
ROUTE = "/v1/chat/completions"
GREEDY = {"temperature": 0, "return_token_ids": True}


def test_a_chat_has_the_tokens_of_the_prompt_that_the_template_makes() -> None:
    async def run() -> None:
        async with service() as s:
            expected = await s.complete(prompt=f"{TEXT}<|assistant|>\n")
            for limit in ({"max_completion_tokens": 8, "max_tokens": 3}, {"max_tokens": 8}):
                body = {"messages": MESSAGES, "request_id": "mine", **GREEDY, **limit}
                status, answer = await s.post(ROUTE, body)
                assert status == 200, answer
                choice, wanted = answer["choices"][0], expected["choices"][0]
                assert (answer["id"], answer["object"]) == ("mine", "chat.completion")
                assert choice["message"] == {"role": "assistant", "content": wanted["text"]}
                assert choice["token_ids"] == wanted["token_ids"]
                assert choice["finish_reason"] == wanted["finish_reason"] == "length"
                assert answer["usage"]["prompt_tokens"] == len(f"{TEXT}<|assistant|>\n")
                assert answer["timings"]["cached_tokens"] > 0

    scenario(run)


def test_tools_come_first_and_the_last_line_can_be_left_out() -> None:
    async def run() -> None:
        async with service() as s:
            for fields, text in (
                ({}, f"{TEXT}<|assistant|>\n"),
                ({"add_generation_prompt": False}, TEXT),
                ({"tools": None}, f"{TEXT}<|assistant|>\n"),
            ):
                body = {"messages": MESSAGES, **fields}
                status, answer = await s.post("/tokenize", body)
                assert (status, bytes(answer["tokens"]).decode()) == (200, text)
            _, answer = await s.post("/tokenize", {"messages": MESSAGES, "tools": TOOLS})
            text = bytes(answer["tokens"]).decode()
            head, _, rest = text.removeprefix("<|tools|>\n").partition("\n")
            assert "look" in head
            assert rest == f"{TEXT}<|assistant|>\n"
            expected = await s.complete(prompt=text)
            body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 8, **GREEDY}
            _, answer = await s.post(ROUTE, body)
            assert answer["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]

    scenario(run)


def test_a_stream_of_a_chat_begins_with_the_role_and_has_the_same_tokens() -> None:
    async def run() -> None:
        async with service() as s:
            body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 6, **GREEDY}
            _, whole = await s.post(ROUTE, body)
            async with s.session.post(s.url + ROUTE, json={**body, "stream": True}) as response:
                assert response.headers["Content-Type"] == "text/event-stream"
                events = [event async for event in events_of(response)]
            assert events.pop() == "[DONE]"
            assert {event["object"] for event in events} == {"chat.completion.chunk"}
            choices = [event["choices"][0] for event in events]
            assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + 5 * [None]
            tokens = [token for choice in choices for token in choice["token_ids"]]
            assert tokens == whole["choices"][0]["token_ids"]
            said = "".join(choice["delta"]["content"] for choice in choices)
            assert said == whole["choices"][0]["message"]["content"]
            assert ["usage" in event for event in events] == [False] * 5 + [True]

    scenario(run)


def test_log_probabilities_have_openai_s_format_for_chats() -> None:
    async def run() -> None:
        async with service() as s:
            body = {"messages": MESSAGES, "max_tokens": 4, **GREEDY}
            _, plain = await s.post(ROUTE, body)
            assert "logprobs" not in plain["choices"][0]
            _, answer = await s.post(ROUTE, {**body, "logprobs": True, "top_logprobs": 2})
            choice = answer["choices"][0]
            assert choice["token_ids"] == plain["choices"][0]["token_ids"]
            told = choice["logprobs"]["content"]
            assert [one["token"] for one in told] == [chr(token) for token in choice["token_ids"]]
            for one in told:
                best = one["top_logprobs"]
                assert len(best) == 2
                assert best[0]["logprob"] >= best[1]["logprob"]
                assert best[0] == {
                    "token": one["token"], "logprob": one["logprob"]
                }, "greedy: the likeliest"  # fmt: skip
                assert sum(math.exp(other["logprob"]) for other in best) <= 1.0 + 1e-9
            _, answer = await s.post(ROUTE, {**body, "logprobs": True})
            assert [one["top_logprobs"] for one in answer["choices"][0]["logprobs"]["content"]] == (
                [[]] * 4
            )

    scenario(run)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages"),
        ({}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]},
            "messages",
        ),
        ({"messages": MESSAGES, "max_completion_tokens": 0}, "max_tokens"),
        ({"messages": MESSAGES, "top_logprobs": 99, "logprobs": True}, "logprobs"),
        ({"messages": MESSAGES, "model": "other"}, "model"),
    ],
)
def test_a_bad_chat_is_refused_with_its_field(fields: dict[str, Any], named: str) -> None:
    async def run() -> None:
        async with service() as s:
            status, answer = await s.post(ROUTE, fields)
            assert status == 400
            assert named in answer["error"]["message"]

    scenario(run)
