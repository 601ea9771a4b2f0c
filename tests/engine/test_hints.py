"""Hints of a router about a request's KV: what is taken, and that nothing else does harm."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.results import Hit
from kvstore.engine.counts import AdapterCounts
from kvstore.engine.hints import HASHES_MAX, FetchHint, read_hints
from kvstore.protocol.page import page_keys
from tests.engine.engine import PLAIN, Request, World

TOKENS = list(range(2, 302))


def fetch_envelope(message_id: str, node: str, keys: Any) -> dict[str, Any]:
    """What a router sends."""
    packed = keys.packed
    hashes = [int.from_bytes(packed[at : at + 8], "little") for at in range(0, len(packed), 32)]
    payload = {
        "source_control_endpoint": f"kvstore://{node}", "block_hashes": hashes, "mode": "copy"
    }  # fmt: skip
    action = {
        "action_id": "1", "action_type": "kv.fetch", "action_version": "1.0", "payload": payload
    }  # fmt: skip
    return {"protocol_version": "0.1", "message_id": message_id, "actions": [action]}


def read(carried: object, parameters: dict[str, Any] | None = None) -> tuple[FetchHint, int]:
    """The hint of a request that carries this, and how many were ignored."""
    request, counts = Request("r", list(TOKENS), parameters), AdapterCounts()
    if carried is not None:
        request.kv_hints = carried  # type: ignore[attr-defined]
    hint, taken = read_hints(request, counts), counts.take()
    assert taken.get("fetch_hints", 0) == bool(hint.node)
    return hint, int(taken.get("hints_ignored", 0))


def keys_of(world: World, name: str = "probe") -> Any:
    """The keys under which the scheduler side asks for ``TOKENS``."""
    world.side.match(Request(name, list(TOKENS)), PLAIN, 0)
    return world.store.asked[-1]


def changed(**fields: Any) -> dict[str, Any]:
    """An envelope, with fields of its action or of itself changed."""
    envelope = fetch_envelope("1", "peer", page_keys(TOKENS, 64))
    for name, value in fields.items():
        (envelope if name in envelope else envelope["actions"][0])[name] = value
    return envelope


def test_a_hint_names_the_holder_of_the_pages_that_are_the_requests_own():
    world = World()
    keys = keys_of(world)
    envelope = json.loads(json.dumps(fetch_envelope("m", "peer", keys[:3])))

    world.side.match(Request("r", list(TOKENS), {"kv_hints": envelope}), PLAIN, 0)

    assert world.store.told == ("peer", 3)
    assert world.side.counts.take()["fetch_hints"] == 1


@pytest.mark.parametrize("parameters", ["text", ["kv_hints"], 5, 0.5])
def test_parameters_that_are_no_mapping_harm_nobody(parameters):
    world = World()
    request = Request("r", list(TOKENS), parameters)

    assert world.side.match(request, PLAIN, 0)[0] == 0
    assert world.side.finished("r") is None


def test_a_hint_for_another_prompt_names_nothing():
    world = World()
    other = page_keys(TOKENS[1:], 64)
    hint = {"kv_hints": fetch_envelope("m", "peer", other)}

    world.side.match(Request("r", list(TOKENS), hint), PLAIN, 0)

    assert world.store.told == ("peer", 0)


def test_a_hint_ends_where_the_prompts_part():
    keys = page_keys(TOKENS, 64)
    beside = page_keys([*TOKENS[:128], *range(900, 1100)], 64)
    hint = read(fetch_envelope("m", "peer", beside))[0]

    assert hint.pages(keys) == 2
    assert hint.pages(keys[:1]) == 1


def test_what_the_prefill_engine_says_comes_before_a_hint():
    world = World()
    hint = fetch_envelope("m", "peer", keys_of(world))
    told = {
        "do_remote_prefill": True, "kvstore_node": "prefill", "kvstore_pages": 2,
        "kvstore_page_tokens": 64, "kv_hints": hint,
    }  # fmt: skip

    world.side.match(Request("r", list(TOKENS), told), PLAIN, 0)

    assert world.store.told == ("prefill", 2)


def test_an_engine_may_carry_the_envelope_as_an_object():
    keys = page_keys(TOKENS, 64)
    plain = fetch_envelope("m", "peer", keys)
    action = SimpleNamespace(**plain["actions"][0])
    envelope = SimpleNamespace(protocol_version="0.1", message_id="m", actions=[action])

    assert read(envelope, {"kv_hints": "not read"}) == read(None, {"kv_hints": plain})
    assert read(envelope)[0].pages(keys) == len(keys)


def test_the_hint_of_a_request_is_counted_once():
    world = World()
    world.store.answer = Hit(1, pending=3)
    asked = Request("r", list(TOKENS), {"kv_hints": changed(action_version="2.0")})

    world.side.match(asked, PLAIN, 0)
    world.now += 1.0
    world.side.match(asked, PLAIN, 0)

    assert world.side.counts.take()["hints_ignored"] == 1


@pytest.mark.parametrize(
    "envelope",
    [
        changed(protocol_version="1.0"),
        changed(action_version="2.0"),
        changed(action_type="kv.pin"),
        changed(payload=None),
        changed(payload={"source_control_endpoint": "tcp://x:1", "block_hashes": [1]}),
        changed(payload={"source_control_endpoint": "kvstore://n", "block_hashes": ["1"]}),
        changed(
            payload={
                "source_control_endpoint": "kvstore://n", "block_hashes": [1], "mode": "move"
            }
        ),
        changed(
            payload={
                "source_control_endpoint": "kvstore://n", "block_hashes": [0] * (HASHES_MAX + 1)
            }
        ),
        changed(actions="none"),
        changed(actions="\ud800"),
        changed(payload={"source_control_endpoint": "kvstore://n", "block_hashes": "\ud800"}),
        "kv.fetch",
        7,
    ],
)  # fmt: skip
def test_what_is_unknown_or_wrong_is_ignored_and_counted(envelope):
    assert read(None, {"kv_hints": envelope}) == (FetchHint(), 1)


def test_an_action_that_is_unknown_does_not_hide_one_that_is_known():
    envelope = changed()
    envelope["actions"].insert(0, {"action_type": "kv.pin", "action_version": "1.0"})

    hint, ignored = read(None, {"kv_hints": envelope})

    assert (hint.node, ignored) == ("peer", 1)


def test_a_request_without_hints_has_none():
    assert read(None) == read(None, {"do_remote_decode": True}) == (FetchHint(), 0)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@given(VALUES, st.sampled_from(["protocol_version", "actions", "payload", "action_type"]))
def test_no_hint_fails_a_request(value, field):
    keys = page_keys(TOKENS, 64)

    for envelope in (value, changed(**{field: value})):
        hint, ignored = read(None, {"kv_hints": envelope})
        assert 0 <= hint.pages(keys) <= len(keys)
        assert ignored <= max(1, len(value) if isinstance(value, list) else 1)
