"""Goal: with a store tokens stay the same, less is computed, and its troubles stay its own."""

import threading
from collections.abc import Callable
from itertools import cycle

import pytest

from engine_adapters.reference.engine import Engine
from engine_adapters.reference.request import State
from engine_adapters.reference.sampler import Sampling
from engine_adapters.reference.scheduler import Limits
from kvstore.engine.load_choice import UNMEASURED_MAX
from kvstore.engine.options import Loads
from kvstore.protocol.errors import PeerUnreachable
from tests.engine_adapters.reference.conftest import Ask, MakeEngine
from tests.engine_adapters.reference.fake_store import FakeNode, FakeStore

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 5
SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=1234)
SAMPLINGS = (Sampling(), SEEDED)


def counted(engine: Engine, source: str) -> float:
    return engine.metrics.prompt_tokens.labels(source)._value.get()


@pytest.mark.parametrize("sampling", [Sampling(), SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 200])
def test_prefill_then_decode_equals_mono(
    make_engine: MakeEngine, ask: Ask, length: int, sampling: Sampling
) -> None:
    node = FakeNode()
    prompt = TEXT[:length]
    mono = make_engine()
    expected = ask(mono, prompt, 20, sampling).wait()
    prefill = make_engine(FakeStore(node), mode="prefill")
    first = ask(prefill, prompt, 20, sampling, to_handoff=True).wait()
    assert first.handoff is not None
    assert first.tokens == expected.tokens[:1]
    assert first.handoff.tail_tokens == length % 64
    assert first.handoff.position == length
    decode = make_engine(FakeStore(node), mode="decode")
    answer = ask(decode, prompt, 20, sampling, from_handoff=first.handoff).wait()
    assert answer.tokens == expected.tokens
    assert answer.text == expected.text
    assert counted(decode, "computed") == 0, "D computed a part of the prompt"
    assert answer.request.timings.restored_tokens == length
    hashes = [engine.kv_hashes("request") for engine in (mono, prefill, decode)]
    assert hashes[0] is not None
    assert hashes[0] == hashes[1] == hashes[2]


def test_the_tail_is_private_read_once_and_short_lived(make_engine: MakeEngine, ask: Ask) -> None:
    node = FakeNode()
    prefill = make_engine(FakeStore(node), mode="prefill")
    ask(prefill, TEXT[:100], to_handoff=True).wait()
    assert node.puts == [(1, 0.0, False), (1, 60.0, True)]
    assert len(node.pages) == 2, "the tail has a space of its own"
    assert node.reported, "the speed of prefill was not reported"


@pytest.mark.parametrize("lost", ["everything", "tail", "head", "second page"])
def test_what_cannot_be_restored_is_computed(make_engine: MakeEngine, ask: Ask, lost: str) -> None:
    node = FakeNode()
    prompt = TEXT[:200]
    expected = ask(make_engine(), prompt, 12, SEEDED).wait()
    prefill = make_engine(FakeStore(node), mode="prefill")
    handoff = ask(prefill, prompt, sampling=SEEDED, to_handoff=True).wait().handoff
    shared = next(pages for name, pages in node.pages.items() if not name.endswith(b"handoff"))
    tails = next(pages for name, pages in node.pages.items() if name.endswith(b"handoff"))
    keys = list(prefill.parts.scheduler._tree._nodes)  # type: ignore[union-attr]
    computed = {"everything": 200, "tail": 8, "head": 200, "second page": 136}[lost]
    if lost in ("everything", "tail"):
        tails.clear()
    if lost in ("everything", "head"):
        del shared[keys[0]]
    if lost == "second page":
        del shared[keys[1]]
    decode = make_engine(FakeStore(node), mode="decode")
    answer = ask(decode, prompt, 12, SEEDED, from_handoff=handoff).wait()
    assert answer.tokens == expected.tokens
    assert counted(decode, "computed") == computed
    assert counted(decode, "restored") == 200 - computed


def test_a_handoff_is_answered_only_when_the_store_has_its_pages(
    make_engine: MakeEngine, ask: Ask
) -> None:
    node = FakeNode()
    node.gate.clear()
    prefill = make_engine(FakeStore(node), mode="prefill")
    answer = ask(prefill, TEXT[:100], to_handoff=True)
    assert node.arrived.acquire(timeout=10.0)
    assert node.arrived.acquire(timeout=10.0)
    other = ask(prefill, "others go on meanwhile", 3).wait()
    assert len(other.tokens) == 3
    assert answer.request.state is State.FLUSHING
    assert answer.outputs.empty(), "answered before the pages were stored"
    node.gate.set()
    assert answer.wait().handoff is not None
    timings = answer.request.timings
    assert 0.0 < timings.compute_s < 5.0
    assert timings.flush_s > 0.0


def test_when_the_store_takes_nothing_the_handoff_says_so(
    make_engine: MakeEngine, ask: Ask
) -> None:
    node = FakeNode(full=True)
    prefill = make_engine(FakeStore(node), mode="prefill")
    handoff = ask(prefill, TEXT[:100], to_handoff=True).wait().handoff
    assert handoff is not None
    assert (handoff.tail_key, handoff.tail_tokens) == (None, 0)
    assert prefill.metrics.store_errors.labels("capacity")._value.get() == 2
    expected = ask(make_engine(), TEXT[:100], 9).wait()
    decode = make_engine(FakeStore(node), mode="decode")
    assert ask(decode, TEXT[:100], 9, from_handoff=handoff).wait().tokens == expected.tokens


def test_a_handoff_of_a_single_token_needs_no_computing(make_engine: MakeEngine, ask: Ask) -> None:
    node = FakeNode()
    handoff = ask(make_engine(FakeStore(node)), TEXT[:80], to_handoff=True).wait().handoff
    decode = make_engine(FakeStore(node))
    answer = ask(decode, TEXT[:80], 1, from_handoff=handoff).wait()
    assert handoff is not None
    assert (answer.tokens, answer.finish_reason) == ([handoff.first_token], "length")


def test_an_aborted_restore_keeps_its_blocks_until_the_job_has_ended(
    make_engine: MakeEngine, ask: Ask
) -> None:
    node = FakeNode()
    ask(make_engine(FakeStore(node), mode="prefill"), TEXT[:200], to_handoff=True).wait()
    decode = make_engine(FakeStore(node), mode="decode", prefix_cache=False)
    for _ in range(node.arrived._value):
        node.arrived.acquire()
    node.gate.clear()
    answer = ask(decode, TEXT[:200], 5)
    assert node.arrived.acquire(timeout=10.0), "no restore was started"
    decode.abort(answer.request)
    ask(decode, "something else", 2).wait()
    assert answer.request.state is State.FINISHED
    assert decode.parts.allocator.free == decode.parts.allocator.count - 12, (
        "blocks of a running job"
    )
    node.gate.set()  # the job ends before or after the engine's last step
    assert_all_free(decode)


def assert_all_free(engine: Engine) -> None:
    assert engine.close(10.0)
    assert engine.parts.allocator.free == engine.parts.allocator.count


def test_garbage_of_a_failed_restore_poisons_nobody(make_engine: MakeEngine, ask: Ask) -> None:
    node = FakeNode()
    expected = ask(make_engine(), TEXT[:200], 8).wait()
    prefill = make_engine(FakeStore(node), mode="prefill")
    handoff = ask(prefill, TEXT[:200], to_handoff=True).wait().handoff
    node.spoil = True  # 0xff bytes are NaNs
    engine = make_engine(FakeStore(node))
    # The tail page's unused rows lie in the block that decoding reads, masked: 0 * NaN is NaN.
    for given in (handoff, None):
        answer = ask(engine, TEXT[:200], 8, from_handoff=given).wait()
        assert answer.tokens == expected.tokens
    assert counted(engine, "restored") == 0


def test_pending_pages_are_waited_for_instead_of_computed(
    make_engine: MakeEngine, ask: Ask
) -> None:
    node = FakeNode()
    ask(make_engine(FakeStore(node)), TEXT[:200], to_handoff=True).wait()
    node.pending_lookups = 5
    engine = make_engine(FakeStore(node))
    ask(engine, TEXT[:200], 8).wait()
    assert node.pending_lookups == 0
    assert counted(engine, "restored") == 192


def test_waiting_for_pending_pages_has_an_end(make_engine: MakeEngine, ask: Ask) -> None:
    node = FakeNode(pending_lookups=1_000_000)
    engine = make_engine(FakeStore(node))
    answer = ask(engine, TEXT[:200], 8).wait()
    assert 0.0 < answer.request.timings.restore_s < 5.0
    assert counted(engine, "computed") == 200


def test_what_would_take_longer_to_load_is_computed(make_engine: MakeEngine, ask: Ask) -> None:
    node = FakeNode()
    expected = ask(make_engine(FakeStore(node)), TEXT[:200], 8, to_handoff=True).wait().tokens
    node.load_seconds = 3600.0
    engine = make_engine(FakeStore(node), prefix_cache=False, loads=Loads.FASTER)
    ask(engine, TEXT[200:300], 1).wait()
    assert counted(engine, "computed") == 100
    assert ask(engine, TEXT[:200], 1).wait().tokens == expected
    assert counted(engine, "restored") == 0
    node.load_seconds = 0.0
    ask(engine, TEXT[:200], 1).wait()
    assert counted(engine, "restored") == 192


def remote_tokens(engine: Engine) -> float:
    return float(engine.metrics.remote_tokens._value.get())


def test_what_only_another_node_has_is_restored_with_the_rest(
    make_engine: MakeEngine, ask: Ask
) -> None:
    node = FakeNode()
    expected = ask(make_engine(FakeStore(node)), TEXT[:200], 8, to_handoff=True).wait().tokens
    node.here, node.remote_seconds = 1, 0.001
    engine = make_engine(FakeStore(node))
    assert ask(engine, TEXT[:200], 1).wait().tokens == expected
    assert (counted(engine, "restored"), remote_tokens(engine)) == (192, 128)


def test_what_another_node_gives_slower_than_it_is_computed_is_left_there(
    make_engine: MakeEngine, ask: Ask
) -> None:
    node = FakeNode()
    expected = ask(make_engine(FakeStore(node)), TEXT[:200], 8, to_handoff=True).wait().tokens
    node.here, node.remote_seconds = 1, 3600.0
    engine = make_engine(FakeStore(node), prefix_cache=False, loads=Loads.FASTER)
    ask(engine, TEXT[200:300], 1).wait()  # measures what computing takes
    assert ask(engine, TEXT[:200], 1).wait().tokens == expected
    assert (counted(engine, "restored"), remote_tokens(engine)) == (64, 0)


def test_what_another_node_does_not_give_after_all_is_computed_and_stored(
    make_engine: MakeEngine, ask: Ask
) -> None:
    node = FakeNode()
    expected = ask(make_engine(FakeStore(node)), TEXT[:200], 8, to_handoff=True).wait().tokens
    node.here, node.gone = 1, 2
    puts = len(node.puts)
    engine = make_engine(FakeStore(node))
    assert ask(engine, TEXT[:200], 1).wait().tokens == expected
    assert (counted(engine, "restored"), remote_tokens(engine)) == (128, 64)
    assert node.puts[puts:] == [(1, 0.0, False)], "the page that did not come"


def test_a_handoff_names_the_node_that_has_the_pages(make_engine: MakeEngine, ask: Ask) -> None:
    there = FakeNode(name="there")
    handoff = ask(make_engine(FakeStore(there)), TEXT[:200], to_handoff=True).wait().handoff
    assert handoff is not None
    assert handoff.kvstore_node == "there"

    here = FakeNode(name="here", pages=there.pages)
    ask(make_engine(FakeStore(here)), TEXT[:200], 8, from_handoff=handoff).wait()
    assert here.told == [("there", 3), ("there", 1)], "the prompt, then its unfilled last page"


def test_an_engine_with_a_dead_store_serves_as_if_it_had_none(
    make_engine: MakeEngine, ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    node = FakeNode(error=PeerUnreachable("nobody listens"))
    engine = make_engine(FakeStore(node))
    expected = ask(make_engine(), TEXT, 8).wait()
    for _ in range(2):
        assert ask(engine, TEXT, 8).wait().tokens == expected.tokens
    assert ask(engine, TEXT, 8, to_handoff=True).wait().handoff is not None
    assert engine.metrics.store_errors.labels("peer_unreachable")._value.get() >= 1
    assert len([r for r in caplog.records if "peer_unreachable" in r.getMessage()]) == 1


def test_what_was_evicted_here_comes_back_from_the_store(make_engine: MakeEngine, ask: Ask) -> None:
    node = FakeNode()
    engine = make_engine(FakeStore(node), blocks=40)
    texts = [TEXT[shift : shift + 300] for shift in range(3)]
    answers = [ask(engine, text, 30).wait().tokens for text in texts]
    again = [ask(engine, text, 30).wait() for text in texts]
    assert [answer.tokens for answer in again] == answers
    assert counted(engine, "restored") >= 256
    assert sum(len(pages) for pages in node.pages.values()) == 3 * 5, "330 tokens are 5 full pages"


def test_requests_survive_preemption_with_the_same_tokens(
    make_engine: MakeEngine, ask: Ask
) -> None:
    roomy, tight = make_engine(), make_engine(blocks=24, prefix_cache=False)
    prompts = [TEXT[index : index + 100] for index in range(4)]
    expected = [ask(roomy, p, 90, SEEDED).wait().tokens for p in prompts]
    answers = [ask(tight, p, 90, SEEDED) for p in prompts]
    assert [answer.wait().tokens for answer in answers] == expected
    assert tight.metrics.preemptions._value.get() > 0


def test_puts_are_bounded_and_what_finds_no_place_is_counted(
    make_engine: MakeEngine, ask: Ask
) -> None:
    node = FakeNode()
    node.gate.clear()
    engine = make_engine(FakeStore(node), limits=Limits(running_max=32))
    answers = [ask(engine, f"{index:03d}" + TEXT[:70], 2) for index in range(20)]
    for answer in answers:
        answer.wait()
    assert len(engine.parts.store._puts) == 16  # type: ignore[union-attr]
    assert engine.metrics.store_pages.labels("skipped")._value.get() == 4
    node.gate.set()


def test_closing_ends_unfinished_requests(make_engine: MakeEngine, ask: Ask) -> None:
    engine = make_engine()
    answers = [ask(engine, TEXT, 1500) for _ in range(3)]
    answers[0].next()
    closer = threading.Thread(target=engine.close)
    closer.start()
    assert {answer.wait().finish_reason for answer in answers} == {"shutdown"}
    closer.join(10.0)
    assert not closer.is_alive()


def test_requests_in_one_batch_get_the_tokens_they_get_alone(
    make_engine: MakeEngine, ask: Ask
) -> None:
    alone, together = make_engine(prefix_cache=False), make_engine()
    prompts = [TEXT[: 20 * n + 1] for n in range(8)]
    expected = [
        ask(alone, p, 10, s).wait().tokens for p, s in zip(prompts, cycle(SAMPLINGS), strict=False)
    ]
    answers = [ask(together, p, 10, s) for p, s in zip(prompts, cycle(SAMPLINGS), strict=False)]
    assert [answer.wait().tokens for answer in answers] == expected


def test_restores_wait_for_room_and_leave_nothing_when_their_requests_go(
    make_engine: MakeEngine, ask: Ask, wait_until: Callable[..., None]
) -> None:
    node = FakeNode()
    prompts = [f"{number} " + TEXT[:130] for number in range(UNMEASURED_MAX + 2)]
    writer = make_engine(FakeStore(node), prefix_cache=False)
    expected = [ask(writer, prompt, 4, SEEDED).wait().tokens for prompt in prompts]
    engine = make_engine(FakeStore(node), prefix_cache=False)
    for _ in range(node.arrived._value):
        node.arrived.acquire()
    node.gate.clear()
    answers = [ask(engine, prompt, 4, SEEDED) for prompt in prompts]
    waited = engine.metrics.loads["room_waits"]._value
    wait_until(lambda: waited.get() == 2)
    for gone in (answers[0], answers[-1]):  # one is being restored, one waits for room
        engine.abort(gone.request)
        wait_until(lambda gone=gone: gone.request.state is State.FINISHED)
    node.gate.set()

    assert [answer.wait().tokens for answer in answers[1:-1]] == expected[1:-1]
    choices = engine.parts.store._choices  # type: ignore[union-attr]
    wait_until(lambda: not choices.decisions._chooser.costs.in_flight)
    assert not choices.waiting


def test_a_node_that_restarts_under_restores_leaves_room_for_the_next_ones(
    make_engine: MakeEngine, ask: Ask
) -> None:
    node = FakeNode()
    expected = ask(make_engine(FakeStore(node)), TEXT[:200], 6, SEEDED).wait().tokens
    engine = make_engine(FakeStore(node), prefix_cache=False)
    node.gone = 0  # looked up, and then gone
    for _ in range(2 * UNMEASURED_MAX):
        assert ask(engine, TEXT[:200], 6, SEEDED).wait().tokens == expected
    node.gone = 1 << 30
    answer = ask(engine, TEXT[:200], 6, SEEDED).wait()

    assert answer.tokens == expected
    assert answer.request.timings.restored_tokens == 192


def test_a_part_is_restored_and_the_rest_computed(make_engine: MakeEngine, ask: Ask) -> None:
    node = FakeNode()
    expected = ask(make_engine(FakeStore(node)), TEXT[:200], 6, SEEDED).wait().tokens
    node.load_seconds = 100.0
    engine = make_engine(FakeStore(node), prefix_cache=False, loads=Loads.FASTER)
    ask(engine, "x" * 100, 1).wait()  # measures computing
    node.here, node.remote_seconds = 1 << 30, 0.0
    computed = counted(engine, "computed")
    assert ask(engine, TEXT[:200], 6, SEEDED).wait().tokens == expected
    assert counted(engine, "computed") == computed + 200, "the node says loading takes forever"
    node.load_seconds = 0.0
    node.here, node.remote_seconds = 1, 1000.0
    assert ask(engine, TEXT[:200], 6, SEEDED).wait().tokens == expected
    assert counted(engine, "computed") == computed + 200 + 136, "one page is here"
    choice = engine.metrics.load_choices.labels("part", "faster")
    assert choice._value.get() == 1


def test_an_aborted_request_that_waits_for_pages_is_forgotten(
    make_engine: MakeEngine, ask: Ask, wait_until: Callable[..., None]
) -> None:
    node = FakeNode(pending_lookups=1 << 30)
    engine = make_engine(FakeStore(node))
    choices = engine.parts.store._choices  # type: ignore[union-attr]
    answer = ask(engine, TEXT[:200], 4)
    wait_until(lambda: choices.waiting == 1)
    engine.abort(answer.request)
    wait_until(lambda: answer.request.state is State.FINISHED)

    assert not choices.waiting
