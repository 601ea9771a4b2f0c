"""Goal: the log tells each point of a push, and says the same at both engines; off by default."""

import json
import logging
from dataclasses import replace
from typing import Any

import pytest

from engine_adapters.reference.pushing import PrefillPushes
from tests.engine_adapters.reference.conftest import Ask, MakeEngine
from tests.engine_adapters.reference.pushed import OPTIONS, pair_of, report

PROMPT = list(range(3, 203))
"""Thirteen blocks, the last one with eight tokens."""
LOGGER = "engine_adapters.reference.observing"


def events_of(caplog: pytest.LogCaptureFixture) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for record in caplog.records:
        if record.name == LOGGER:
            event = json.loads(record.getMessage())
            found.setdefault(event.pop("event"), []).append(event)
    return found


def sides(**options: Any) -> dict[str, Any]:
    one = {"handoff": replace(OPTIONS, events=True), **options}
    return {"prefill": one, "decode": one}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_push_is_told_at_its_four_points(
    make_engine: MakeEngine, ask: Ask, caplog: pytest.LogCaptureFixture, ranks: int
) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        pair = pair_of(make_engine, ask, **sides(ranks=ranks))
        room = 4_000 + ranks
        here = pair.ask_prefill(PROMPT, room, name="p")
        there = pair.ask_decode(PROMPT, room, 4, name="d").wait()
        here.wait()
        assert report(there) == ("success", None)
        events = events_of(caplog)

    assert set(events) == {"before_send", "transfer", "after_restore", "decode_step"}
    assert {one["room"] for told in events.values() for one in told} == {room}
    sends = events["before_send"]
    assert {one["request"] for one in sends} == {"p"}
    layout = {"layers": 2, "ranks": ranks, "kv_heads": 2, "head_dim": 16, "dtype": "float32",
              "block_tokens": 16}  # fmt: skip
    for one in sends:
        first, stop = one["tokens"]
        assert one["layout"] == layout
        assert one["prompt_tokens"] == 200
        assert one["cached_tokens"] == 0
        assert one["blocks"]["count"] == -(-(stop - first) // 16)
        assert one["blocks"]["min"] == min(one["blocks"]["first"])
        assert len(one["k_hash"]) == one["layers"][1] - one["layers"][0]
    assert sum((one["tokens"][1] - one["tokens"][0]) for one in sends) == 200 * 2
    total = sum(one["bytes"] for one in sends)
    assert total == 13 * 16 * 2 * 2 * 32 * 4
    moved = events["transfer"]
    assert {one["rank"] for one in moved} == set(range(ranks))
    assert {(one["transport"], one["device"], one["code"]) for one in moved} == {("tcp", "cpu", "")}
    assert all(sum(one["buffer_bytes"]) <= one["bytes"] for one in moved)
    assert all(0 <= one["seconds"] < 20 for one in moved)
    assert total < sum(one["bytes"] for one in moved) < total + 200 * ranks, "the aux data, too"
    (restored,) = events["after_restore"]
    assert (restored["request"], restored["state"], restored["pushed_tokens"]) == (
        "d",
        "success",
        200,
    )
    assert restored["blocks"]["count"] == 13
    last = [one for one in sends if one["hash_position"] == restored["hash_position"] == 12]
    for name in ("k_hash", "v_hash"):
        assert [value for one in last for value in one[name]] == restored[name]
    steps = events["decode_step"]
    assert [one["step"] for one in steps] == [1, 2, 3]
    assert [one["next_token"] for one in steps] == there.tokens[1:]
    assert [one["last_token"] for one in steps] == there.tokens[:-1]
    assert [one["slot"] % 16 for one in steps] == [8, 9, 10]
    assert [one["finish_reason"] for one in steps] == [None, None, "length"]


def test_a_push_that_fails_is_told_too(
    make_engine: MakeEngine, ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        pair = pair_of(make_engine, ask, **sides())
        answer = pair.ask_decode(PROMPT, 4_100, 2, name="d")
        pushes = pair.prefill.parts.pushes
        assert isinstance(pushes, PrefillPushes)
        for manager in pushes._managers:
            manager.close()
        answer.wait()
        events = events_of(caplog)

    (restored,) = events["after_restore"]
    assert (restored["state"], restored["pushed_tokens"], restored["k_hash"]) == ("failed", 0, [])
    assert [one["step"] for one in events["decode_step"]] == [0, 1]


def test_nothing_is_told_unless_it_is_asked_for_and_never_of_requests_without_a_push(
    make_engine: MakeEngine, ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        for answer in pair_of(make_engine, ask).ask(PROMPT, 2):
            answer.wait()
        assert not events_of(caplog)
        pair = pair_of(make_engine, ask, **sides())
        for engine in (pair.prefill, pair.decode):
            ask(engine, PROMPT, 2).wait()
        assert not events_of(caplog)
