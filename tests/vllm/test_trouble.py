"""The engine serves on, with right tokens and no stall, whatever becomes of the node."""

import signal
import time

import pytest

from kvstore.protocol.wire import PROTOCOL_MAJOR as MAJOR
from kvstore.protocol.wire import PROTOCOL_MINOR as MINOR
from tests.vllm.conftest import Node, prompt
from tests.vllm.engines import EngineError

HITS = "vllm:external_prefix_cache_hits"
PROMPTS = [prompt(300, seed) for seed in range(8)]


def test_an_engine_outlives_its_node(spawn, tmp_path, start, plain, wait_until):
    expected = plain.tokens(PROMPTS)
    socket = tmp_path / "kv.sock"
    engine = start(f"unix://{socket}", enable_prefix_caching=False)

    assert engine.tokens(PROMPTS) == expected, "nobody is there yet"
    node = Node(spawn, socket)

    def hits():
        before = engine.metric(HITS)
        assert engine.tokens(PROMPTS) == expected
        engine.ask("settle")
        return engine.metric(HITS) - before == 8 * 256

    wait_until(hits, 20.0, "the engine uses a node that came later")
    engine.send("generate", prompts=[{"tokens": p} for p in PROMPTS], max_tokens=12)
    node.process.kill()
    answers = engine.answer()["answers"]
    assert [answer["tokens"] for answer in answers] == expected, "killed in the middle"
    assert engine.tokens(PROMPTS) == expected
    node.start()
    wait_until(hits, 20.0, "the engine uses the node that was started again")
    assert engine.log.read_text().count("no node at") == 1, "one warning an engine"


def test_a_stopped_node_costs_a_few_milliseconds_once_also_in_the_middle_of_loads(
    node, start, plain, wait_until
):
    expected = plain.tokens(PROMPTS)
    limits = {"extra": {"lookup_timeout_ms": 5}}
    engine = start(node.address, transfer=limits, enable_prefix_caching=False)
    assert engine.tokens(PROMPTS) == expected
    engine.ask("settle")

    node.process.send_signal(signal.SIGSTOP)
    seconds = engine.ask("time_lookups", count=200, tokens=PROMPTS[0])["seconds"]
    began = time.monotonic()
    assert engine.tokens(PROMPTS) == expected
    took = time.monotonic() - began
    node.process.send_signal(signal.SIGCONT)

    assert sorted(seconds)[int(0.99 * len(seconds))] <= 0.005
    assert took < 10.0

    def hits():
        before = engine.metric(HITS)
        assert engine.tokens(PROMPTS) == expected
        return engine.metric(HITS) - before == 8 * 256

    wait_until(hits, 20.0, "the node goes on, and is used again")
    engine.send("generate", prompts=[{"tokens": p} for p in PROMPTS], max_tokens=12)
    node.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    answers = engine.answer()["answers"]
    took = time.monotonic() - began
    node.process.send_signal(signal.SIGCONT)

    assert [answer["tokens"] for answer in answers] == expected, "stopped in the middle of loads"
    assert took < 6.0


@pytest.mark.parametrize(
    ("before", "changes", "named"),
    [
        (
            "from kvstore.protocol import wire; wire.PROTOCOL_MAJOR = 9",
            {},
            f"client speaks protocol {MAJOR}.{MINOR}, this node 9.{MINOR}",
        ),
        (
            "pass",
            {"host.extent_bytes": 1 << 16, "host.capacity_bytes": 1 << 20},
            "page_bytes: 131072 is more than an extent (65536)",
        ),
    ],
    ids=["another protocol", "pages do not fit"],
)
def test_a_node_that_cannot_serve_this_engine_is_named_once(
    spawn, tmp_path, start, plain, wait_until, before, changes, named
):
    expected = plain.tokens(PROMPTS)
    socket = tmp_path / "kv.sock"
    wrong = Node(spawn, socket, before, **changes)
    pages = {"extra": {"page_tokens": 256}}
    engine = start(wrong.address, transfer=pages, enable_prefix_caching=False)
    for _ in range(3):
        assert engine.tokens(PROMPTS) == expected

    assert engine.metric(HITS) == 0
    lines = engine.log.read_text().splitlines()
    assert sum(named in line for line in lines) == 1, "one warning an engine"
    wrong.process.kill()
    Node(spawn, socket)

    def hits():
        assert engine.tokens(PROMPTS) == expected
        engine.ask("settle")
        return engine.metric(HITS) > 0

    wait_until(hits, 40.0, "a node that fits is used")


def test_pages_that_are_not_made_of_blocks_and_drafts_with_kv_are_refused_at_start(
    node, start, model
):
    with pytest.raises(EngineError) as raised:
        start(node.address, transfer={"extra": {"page_tokens": 48}})
    assert "page_tokens: 48 is not a multiple of the engine's block of 32" in str(raised.value)

    draft = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}
    with pytest.raises(EngineError) as raised:
        start(node.address, speculative_config=draft)
    assert "speculative_config: method draft_model: its draft layers have KV" in str(raised.value)


def test_a_model_with_other_states_is_refused_at_start_by_its_name(node, start, make):
    with pytest.raises(EngineError) as raised:
        start(node.address, model=make("mamba"))
    assert "model: MambaForCausalLM has layers with a state (Mamba, " in str(raised.value)
