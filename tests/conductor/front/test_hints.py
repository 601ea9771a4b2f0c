"""Goal: an engine learns which other node has more of its prompt, and is told nothing else."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conductor.protocols import PROTOCOLS
from conductor.protocols.base import PairRequest
from conductor.protocols.hints import PAGES_MAX, fetch_hint
from kvstore.engine.counts import AdapterCounts
from kvstore.engine.hints import FetchHint, read_hints
from kvstore.protocol.page import page_keys
from tests.conductor.front.test_bringing_live import KEYS, PROMPT, Scene, scene
from tests.conductor.test_service import stored
from tests.loops import eventually, in_loop


def read(parameters: dict[str, Any]) -> tuple[FetchHint, int]:
    """What an adapter takes from transfer parameters, and how much it ignores."""
    counts = AdapterCounts()
    hint = read_hints(SimpleNamespace(kv_transfer_params=parameters), counts)  # type: ignore[arg-type]
    return hint, int(counts.take().get("hints_ignored", 0))


async def asked(made: Scene, engine: str, prompt: list[int] = PROMPT) -> dict[str, Any]:
    """The transfer parameters with which an engine was asked; empty = none."""
    before = len(made.engines[engine].requests)
    status, _, _ = await made.client.complete(prompt)
    assert status == 200
    (request,) = made.engines[engine].requests[before:]
    assert request["prompt"] == prompt
    found: dict[str, Any] = request.get("kv_transfer_params") or {}
    return found


async def has(made: Scene, node: str, pages: int, medium: str = "CPU") -> None:
    """Let a node have pages of the prompt, and wait until the Conductor knows."""
    made.publishers[node].publish([stored(KEYS[:pages], medium)])

    def known() -> bool:
        (found,) = made.client.conductor._bringer._prefixes.match("m", [KEYS])
        return (f"node/{node}", 4 * pages) in {(one.worker, one.tokens) for one in found}

    await eventually(known)


async def only(made: Scene, engine: str) -> None:
    """Let no other engine serve."""
    for name in set(made.engines) - {engine}:
        assert await made.client.delete(f"/v1/engines/{name}") == 204


@pytest.mark.parametrize(
    ("here", "there", "told"), [(0, 0, 0), (0, 3, 3), (2, 3, 3), (3, 3, 0), (4, 3, 0)]
)
@in_loop
async def test_an_engine_is_told_of_a_node_that_has_more_than_its_own(
    here: int, there: int, told: int
) -> None:
    async with scene(protocol="vllm") as made:
        await only(made, "e1")
        for node, pages in (("n1", here), ("n2", there)):
            if pages:
                await has(made, node, pages)
        hint, ignored = read(await asked(made, "e1"))
        assert (hint.node, hint.pages(KEYS), len(hint.hashes)) == ("n2" * bool(told), told, told)
        assert ignored == 0


@in_loop
async def test_the_prefill_engine_of_a_pair_is_told_and_the_decode_engine_gets_its_answer() -> None:
    async with scene(protocol="vllm", roles=("prefill", "decode")) as made:
        await has(made, "n2", 3, "STORAGE")
        told = await asked(made, "e1")
        assert told["do_remote_decode"] is True
        assert read(told)[0].node == "n2"
        relayed = made.engines["e2"].requests[-1]["kv_transfer_params"]
        assert "kv_hints" not in relayed
        assert relayed["handoff_id"] == "handoff of e1"


@in_loop
async def test_an_engine_whose_protocol_takes_no_hints_gets_none() -> None:
    async with scene(protocol="reference") as made:
        await only(made, "e1")
        await has(made, "n2", 3)
        assert await asked(made, "e1") == {}


@in_loop
async def test_a_hint_names_a_bounded_number_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conductor.protocols.hints.PAGES_MAX", 2)
    async with scene(protocol="vllm") as made:
        await only(made, "e1")
        await has(made, "n2", 5)
        hint, _ = read(await asked(made, "e1"))
        assert (len(hint.hashes), hint.pages(KEYS)) == (2, 2)


def test_the_longest_hint_takes_43_kilobytes() -> None:
    keys = page_keys(np.zeros(4 * PAGES_MAX + 400, dtype=np.uint32), 4)
    raw = bytes(fetch_hint(7, "n" * 64, keys))
    assert len(json.loads(raw)["actions"][0]["payload"]["block_hashes"]) == PAGES_MAX
    assert len(raw) < 44_000


def test_without_a_hint_the_request_to_a_prefill_engine_is_as_before() -> None:
    prefill = PROTOCOLS["vllm"].prefill
    assert prefill is not None
    body = prefill(PairRequest({}, 1, "http://p", "http://d"))
    assert bytes(body["kv_transfer_params"]) == b'{"do_remote_decode":true}'
