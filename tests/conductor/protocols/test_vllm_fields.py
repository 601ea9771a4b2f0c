"""Goal: a prefill server of vLLM computes the prompt and one token, whatever else is asked for."""

import json
from typing import Any

import msgspec
import pytest

from conductor.protocols import PROTOCOLS
from conductor.protocols.base import Fields, PairRequest

PROMPT: dict[str, Any] = {"prompt": "x", "max_tokens": 9}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
TOOLS = [{"type": "function", "function": {"name": "look"}}]


def fields_of(body: dict[str, Any]) -> Fields:
    return {name: msgspec.Raw(json.dumps(value).encode()) for name, value in body.items()}


def to_prefill(body: dict[str, Any]) -> dict[str, Any]:
    prefill = PROTOCOLS["vllm"].prefill
    assert prefill is not None
    asked = prefill(PairRequest(fields_of(body), 1, "http://p", "http://d"))
    found: dict[str, Any] = json.loads(msgspec.json.encode(asked))
    return found


def test_a_completion_gets_one_token_a_chat_by_both_of_its_names() -> None:
    common = {
        "max_tokens": 1, "stream": False, "ignore_eos": True,
        "kv_transfer_params": {"do_remote_decode": True},
    }  # fmt: skip
    assert to_prefill(PROMPT) == {**PROMPT, **common}
    for limits in ({}, {"max_tokens": 7}, {"max_completion_tokens": 7}):
        assert to_prefill({**CHAT, **limits}) == {**CHAT, **common, "max_completion_tokens": 1}
    named = to_prefill({**PROMPT, "max_completion_tokens": 7})
    assert named == {**PROMPT, **common, "max_completion_tokens": 1}


@pytest.mark.parametrize("body", [PROMPT, CHAT])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_tokens", 5),
        ("stop", ["a"]),
        ("stop_token_ids", [7]),
        ("best_of", 3),
        ("use_beam_search", False),
        ("length_penalty", 0.5),
        ("prompt_logprobs", 2),
        ("echo", True),
        ("return_token_ids", True),
        ("return_prompt_text", True),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_a_field_that_does_not_go_with_one_token_is_left_out_at_the_prefill_server_only(
    body: dict[str, Any], field: str, value: object
) -> None:
    asked = {**body, field: value}
    assert to_prefill(asked) == to_prefill(body)
    to_decode = PROTOCOLS["vllm"].decode(
        PairRequest(fields_of(asked), 1, "http://p", "http://d"), msgspec.Raw(b"{}")
    )
    assert to_decode == {**fields_of(asked), "kv_transfer_params": msgspec.Raw(b"{}")}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", TOOLS),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("add_generation_prompt", False),
        ("continue_final_message", True),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("documents", [{"text": "x"}]),
        ("reasoning_effort", "low"),
        ("truncate_prompt_tokens", 50),
        ("truncation_side", "left"),
        ("cache_salt", "s"),
        ("priority", -1),
        ("logprobs", True),
        ("thinking_token_budget", 5),
        ("seed", 3),
    ],
)
def test_what_can_be_part_of_the_prompt_or_is_harmless_stays(field: str, value: object) -> None:
    assert to_prefill({**CHAT, field: value}) == {**to_prefill(CHAT), field: value}


@pytest.mark.parametrize(
    ("field", "value", "left_out"),
    [("use_beam_search", True, True), ("truncate_prompt_tokens", -1, False)],
)
def test_kv_that_decode_would_not_take_is_not_kept_for_it(
    field: str, value: object, left_out: bool
) -> None:
    expected = to_prefill(PROMPT)
    del expected["kv_transfer_params"]
    if not left_out:
        expected[field] = value
    assert to_prefill({**PROMPT, field: value}) == expected


def test_the_end_of_the_text_does_not_end_an_answer_of_one_token() -> None:
    assert to_prefill({**PROMPT, "ignore_eos": False})["ignore_eos"] is True
