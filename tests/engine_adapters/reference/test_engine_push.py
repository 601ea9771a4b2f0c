"""Goal: what is pushed from prefill to decode gives the tokens of one engine, byte for byte."""

from dataclasses import replace
from typing import Any

import pytest

from engine_adapters.reference.handoff_options import PushAfter
from engine_adapters.reference.prefix_tree import TreeChange
from engine_adapters.reference.request import State
from engine_adapters.reference.sampler import Sampling
from engine_adapters.reference.scheduler import Limits
from engine_adapters.reference.tokenizer import TextStream
from kvstore.handoff.decode import DecodeManager
from kvstore.handoff.prefill import Sender
from kvstore.protocol.errors import InvalidArgument
from tests.cluster.nodes import files
from tests.conftest import WaitUntil
from tests.engine_adapters.reference.conftest import Ask, MakeEngine
from tests.engine_adapters.reference.fake_store import FakeNode, FakeStore
from tests.engine_adapters.reference.pushed import OPTIONS, PATIENCE, kept_hashes, pair_of, report

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 5
SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=1234)


@pytest.mark.parametrize("sampling", [Sampling(), SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("length", [1, 15, 16, 63, 64, 65, 128, 200])
def test_pushed_tokens_and_kv_are_those_of_one_engine(
    make_engine: MakeEngine, ask: Ask, length: int, sampling: Sampling
) -> None:
    prompt = TEXT[:length]
    mono = make_engine()
    expected = ask(mono, prompt, 20, sampling).wait()
    pair = pair_of(make_engine, ask)
    here, there = pair.ask(prompt, 20, sampling)

    assert there.wait().tokens == expected.tokens
    assert there.text == expected.text
    assert here.wait().tokens == expected.tokens[:1]
    assert report(here) == report(there) == ("success", None)
    assert there.request.timings.pushed_tokens == length
    assert kept_hashes(pair) == [mono.kv_hashes("request")] * 2


def test_engines_with_certificates_push_and_one_without_computes(
    make_engine: MakeEngine, ask: Ask
) -> None:
    prompt = TEXT[:128]
    expected = ask(make_engine(), prompt, 8).wait().tokens
    with_tls = {"handoff": replace(OPTIONS, certificates=files())}
    pair = pair_of(make_engine, ask, prefill=with_tls, decode=with_tls)
    here, there = pair.ask(prompt, 8)
    assert there.wait().tokens == expected
    assert here.wait().tokens == expected[:1]
    assert report(here) == report(there) == ("success", None)
    pair.decode = make_engine(mode="decode", handoff=OPTIONS)
    _, there = pair.ask(prompt, 8)
    assert there.wait().tokens == expected
    assert report(there) == ("failed", "unreachable")


def test_prompts_of_many_chunks_that_share_prefixes_are_pushed_whole(
    make_engine: MakeEngine, ask: Ask
) -> None:
    mono = make_engine(prefix_cache=False)
    small = {"limits": Limits(token_budget=24)}
    pair = pair_of(make_engine, ask, prefill=small, decode=small)
    prompts = [TEXT[: 70 + 37 * number] + f" and {number}" * 9 for number in range(7)]
    both = [pair.ask(one, 12, SEEDED, name=f"r{at}") for at, one in enumerate(prompts)]
    for at, (one, (here, there)) in enumerate(zip(prompts, both, strict=True)):
        expected = ask(mono, one, 12, SEEDED, id=f"r{at}").wait()
        assert there.wait().tokens == expected.tokens
        assert report(here.wait()) == report(there) == ("success", None)
        assert kept_hashes(pair, f"r{at}") == [mono.kv_hashes(f"r{at}")] * 2


@pytest.mark.parametrize(("after", "sends"), [("layer", 16), ("chunk", 8), ("prompt", 8)])
def test_kv_pushed_after_chunks_or_the_whole_prompt_are_those_of_one_engine(
    make_engine: MakeEngine,
    ask: Ask,
    monkeypatch: pytest.MonkeyPatch,
    after: PushAfter,
    sends: int,
) -> None:
    mono = make_engine()
    expected = ask(mono, TEXT[:256], 8).wait()
    options = {"handoff": replace(OPTIONS, push_after=after), "limits": Limits(token_budget=32)}
    pair = pair_of(make_engine, ask, prefill=options)
    steps, made = pair.prefill.metrics.step_seconds._sum, []
    real = Sender.send

    def send(sender: Sender, layers: range, *others: Any) -> None:
        made.append((steps.get(), layers))
        real(sender, layers, *others)

    monkeypatch.setattr(Sender, "send", send)
    here, there = pair.ask(TEXT[:256], 8)

    assert there.wait().tokens == expected.tokens
    assert report(here.wait()) == report(there) == ("success", None)
    assert kept_hashes(pair) == [mono.kv_hashes("request")] * 2
    assert len(made) == sends
    assert {len(layers) for _, layers in made} == {1 if after == "layer" else 2}
    assert len({before for before, _ in made}) == (1 if after == "prompt" else 8)


FAKE = {"handoff": replace(OPTIONS, fake=True), "prefix_cache": False}


def test_a_fake_push_succeeds_without_a_byte_and_the_answers_say_so(
    make_engine: MakeEngine, ask: Ask
) -> None:
    first = ask(make_engine(), TEXT[:200], 1).wait().tokens
    pair = pair_of(make_engine, ask, prefill=FAKE, decode=FAKE)
    here, there = pair.ask(TEXT[:200], 4)
    assert there.wait().tokens[:1] == here.wait().tokens == first
    for one in (here, there):
        assert report(one) == ("success", None)
        told = one.handoff and one.handoff.handoff
        assert told
        assert told.fake
        assert told.bytes < 200, "the aux data"
    layers = kept_hashes(pair)[1].layers
    assert len({one for layer in layers for one in (layer.k, layer.v)}) == 1, "all are zeros"


@pytest.mark.parametrize("fake", ["prefill", "decode"])
def test_one_side_that_pushes_nothing_fails_the_push_and_the_tokens_are_right(
    make_engine: MakeEngine, ask: Ask, fake: str
) -> None:
    expected = ask(make_engine(), TEXT[:200], 6).wait().tokens
    sides: Any = {fake: FAKE}
    pair = pair_of(make_engine, ask, **sides)
    here, there = pair.ask(TEXT[:200], 6)
    assert there.wait().tokens == expected
    assert report(there) == ("failed", "unreachable")
    pair.prefill.abort(here.request)


@pytest.mark.parametrize("kept", [{"prefix_cache": True}, {"transport": "mooncake"}])
def test_what_was_never_pushed_is_not_kept(make_engine: MakeEngine, kept: dict[str, Any]) -> None:
    handoff = replace(OPTIONS, fake=True, transport=kept.pop("transport", "tcp"))
    with pytest.raises(InvalidArgument, match="fake"):
        make_engine(mode="decode", **({"handoff": handoff, "prefix_cache": False} | kept))


def test_blocks_in_limbo_are_shown(
    make_engine: MakeEngine, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of(make_engine, ask)
    monkeypatch.setattr(DecodeManager, "stats", lambda _: {"limbo_blocks": 7, "aux_slots": 0})
    assert b"reference_engine_limbo_blocks 7.0" in pair.decode.metrics.text()
    assert b"reference_engine_limbo_blocks 0.0" in pair.prefill.metrics.text()


def test_what_decode_has_of_a_prompt_is_not_pushed(make_engine: MakeEngine, ask: Ask) -> None:
    pair = pair_of(make_engine, ask)
    ask(pair.decode, TEXT[:150], 2).wait()
    _, there = pair.ask(TEXT[:300])
    expected = ask(make_engine(), TEXT[:300], 16).wait()

    assert there.wait().tokens == expected.tokens
    timings = there.request.timings
    assert (timings.cached_tokens, timings.pushed_tokens) == (128, 300 - 128)


@pytest.mark.parametrize(
    ("max_tokens", "stops", "reason"), [(1, [], "length"), (9, ["first"], "stop")]
)
def test_a_first_token_that_is_final_ends_the_request_without_a_step(
    make_engine: MakeEngine, ask: Ask, max_tokens: int, stops: list[str], reason: str
) -> None:
    prompt = TEXT[:100]
    first = ask(make_engine(), prompt, 1).wait()
    pair = pair_of(make_engine, ask)
    there = pair.ask(prompt, max_tokens, text=TextStream([first.text] if stops else []))[1]

    assert there.wait().tokens == first.tokens
    assert there.finish_reason == reason
    assert pair.decode.metrics.step_seconds._sum.get() == 0.0


def test_a_request_without_a_seed_has_that_of_prefill(make_engine: MakeEngine, ask: Ask) -> None:
    pair = pair_of(make_engine, ask)
    here, there = Sampling(temperature=0.9, seed=11), Sampling(temperature=0.9, seed=12)
    pair.ask_prefill(TEXT[:90], 1_000, here)
    tokens = pair.ask_decode(TEXT[:90], 1_000, 12, there).wait().tokens

    assert tokens == ask(make_engine(), TEXT[:90], 12, here).wait().tokens


def test_with_a_store_prefill_does_not_wait_for_decode_and_decode_restores_what_is_there(
    make_engine: MakeEngine, ask: Ask, wait_until: WaitUntil
) -> None:
    node = FakeNode()
    pair = pair_of(make_engine, ask, (FakeStore(node), FakeStore(node)))
    here = pair.ask_prefill(TEXT[:300], 1_001)
    wait_until(lambda: here.request.state is State.INFLIGHT)
    wait_until(lambda: sum(map(len, node.pages.values())) == 300 // 64)
    there = pair.ask_decode(TEXT[:300], 1_001).wait()

    assert there.tokens == ask(make_engine(), TEXT[:300], 16).wait().tokens
    timings = there.request.timings
    assert (timings.restored_tokens, timings.pushed_tokens) == (256, 300 - 256)
    assert report(here.wait()) == report(there) == ("success", None)
    handoff = here.handoff
    assert handoff is not None
    assert (handoff.kvstore_pages, handoff.kvstore_node) == (4, "node")


def test_what_the_store_loses_after_decode_has_counted_on_it_is_computed(
    make_engine: MakeEngine, ask: Ask, wait_until: WaitUntil
) -> None:
    node = FakeNode()
    pair = pair_of(make_engine, ask, (FakeStore(node), FakeStore(node)))
    here = pair.ask_prefill(TEXT[:300], 1_002)
    wait_until(lambda: sum(map(len, node.pages.values())) == 300 // 64)
    node.gone = 1
    there = pair.ask_decode(TEXT[:300], 1_002).wait()

    assert there.tokens == ask(make_engine(), TEXT[:300], 16).wait().tokens
    timings = there.request.timings
    assert (timings.restored_tokens, timings.pushed_tokens) == (2 * 64, 0), "it asks once more"
    assert report(here.wait()) == ("success", None)


def test_decode_without_memory_renews_until_it_has_some(
    make_engine: MakeEngine, ask: Ask, wait_until: WaitUntil
) -> None:
    node = FakeNode()
    ask(make_engine(FakeStore(node)), TEXT[:300], to_handoff=True).wait()
    brief = replace(OPTIONS, patience=replace(PATIENCE, bootstrapping_s=5.0))
    sides = {"prefill": {"handoff": brief}, "decode": {"handoff": brief, "blocks": 40}}
    pair = pair_of(make_engine, ask, (None, FakeStore(node)), **sides)
    node.gate.clear()
    restoring = ask(pair.decode, TEXT[:300], 300)  # it holds 20 blocks as long as it restores
    wait_until(lambda: restoring.request.state is State.RESTORING)
    here, there = pair.ask(TEXT[7:380])
    wait_until(lambda: [one.seconds > 5.1 for one in pair.decode.handoffs()] == [True])
    assert there.request.state is State.PREALLOC
    assert [(one.state, one.missing) for one in pair.prefill.handoffs()] == [("BOOTSTRAPPING", [])]

    node.gate.set()
    assert there.wait().tokens == ask(make_engine(), TEXT[7:380], 16).wait().tokens
    assert report(here.wait()) == report(there) == ("success", None)
    assert len(restoring.wait().tokens) == 300


def test_many_requests_in_little_memory_all_get_their_tokens(
    make_engine: MakeEngine, ask: Ask
) -> None:
    tight = {"blocks": 44, "prefix_cache": False}
    pair = pair_of(make_engine, ask, prefill=tight, decode=tight)
    mono = make_engine()
    prompts = [TEXT[number : number + 90 + 20 * number] for number in range(8)]
    both = [pair.ask(one, 40, SEEDED, name=f"r{at}") for at, one in enumerate(prompts)]
    for one, (_, there) in zip(prompts, both, strict=True):
        assert there.wait().tokens == ask(mono, one, 40, SEEDED).wait().tokens


def test_each_handoff_is_counted_and_what_was_pushed_is_told_as_events(
    make_engine: MakeEngine, ask: Ask
) -> None:
    pair = pair_of(make_engine, ask)
    changes: list[TreeChange] = []
    pair.decode.on_change = changes.extend
    here, there = pair.ask(TEXT[:200])
    there.wait()
    here.wait()
    for engine in (pair.prefill, pair.decode):
        assert engine.metrics.handoffs.labels("success", "")._value.get() == 1
        assert engine.metrics.handoff_bytes._value.get() > 200 * 2 * 2 * 2 * 16 * 4
    assert [(change.stored, len(change.keys)) for change in changes] == [(True, 3)]
    assert there.handoff is not None
    assert there.handoff.handoff is not None
    assert set(there.handoff.handoff.seconds) >= {"bootstrapping", "waiting_for_input"}
    assert ask(pair.decode, TEXT[:200], 2).wait().request.timings.cached_tokens == 192


def test_rows_of_other_requests_are_not_pushed_with_the_last_block(
    make_engine: MakeEngine, ask: Ask
) -> None:
    pair = pair_of(make_engine, ask, prefill={"prefix_cache": False})
    ask(pair.prefill, TEXT[:254], 3).wait()  # its blocks are given away next
    here, there = pair.ask(TEXT[:5], 1)
    assert len(there.wait().tokens) == 1
    assert report(here.wait()) == ("success", None)
    pool = pair.decode.parts.pool
    for plane in (*pool.keys, *pool.values):
        assert int(plane.flatten(3).any(dim=3).sum()) == 5
