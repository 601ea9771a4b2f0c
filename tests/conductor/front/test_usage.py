"""Usage of streams: always asked for, and shown only to clients that asked."""

import json

import msgspec
import pytest

from conductor.front.openai import without_usage
from tests.conductor.fakes import FakeEngine, serving, sse, texts
from tests.loops import in_loop


@pytest.mark.parametrize(
    ("asked", "sent", "shown"),
    [
        ({}, {"include_usage": True}, False),
        ({"stream_options": None}, {"include_usage": True}, False),
        ({"stream_options": {"include_usage": False}}, {"include_usage": True}, False),
        ({"stream_options": {"x": [1]}}, {"x": [1], "include_usage": True}, False),
        ({"stream_options": {"include_usage": True}}, {"include_usage": True}, True),
    ],
)
@in_loop
async def test_usage_is_asked_for_in_every_stream_and_removed_if_the_client_did_not_ask(
    asked: dict[str, object], sent: dict[str, object], shown: bool
) -> None:
    engine = FakeEngine("e", "mixed")
    engine.like_openai = True
    async with serving(engine) as client:
        status, answer, headers = await client.complete(stream=True, **asked)
        assert status == 200
        assert engine.requests[0]["stream_options"] == sent
        events = sse(answer)
        assert texts(events) == ["e:0 ", "e:1 ", "e:2 "]
        assert events[-1] == "[DONE]"
        assert any(isinstance(one, dict) and one.get("usage") for one in events) == shown
        decision = await client.decision(headers["X-Request-Id"])
        assert decision["attempts"][0]["served"]["prompt_tokens"] == 9


@in_loop
async def test_a_whole_answer_and_options_that_are_none_are_passed_on_as_they_are() -> None:
    engine = FakeEngine("e", "mixed")
    async with serving(engine) as client:
        await client.complete()
        await client.complete(stream=True, stream_options="yes")
        assert "stream_options" not in engine.requests[0]
        assert engine.requests[1]["stream_options"] == "yes"


EVENTS = [
    {"choices": [{"text": 'he said "choices": [] and "usage": {}'}], "usage": None},
    {"choices": [], "prompt_filter_results": []},
    {"choices": [{"text": "x"}], "usage": {"prompt_tokens": 3}},
]


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_only_an_event_of_usage_and_nothing_else_is_removed(end: bytes) -> None:
    kept = b"".join(b"data: " + msgspec.json.encode(one) + end for one in EVENTS)
    for spaced in (False, True):
        usage = {"id": "x", "choices": [], "usage": {"prompt_tokens": 3}}
        text = json.dumps(usage, indent=None, separators=(", ", " : ") if spaced else (",", ":"))
        removed = b"data: " + text.encode() + end
        assert without_usage(kept + removed + b"data: [DONE]" + end) == kept + b"data: [DONE]" + end
        assert without_usage(removed) == b""
    assert without_usage(kept) == kept
    assert without_usage(b'event: x\ndata: {"choices": [' + end) == (
        b'event: x\ndata: {"choices": [' + end
    )
