"""Goal: whatever ends a push, the request gets its tokens, and no block or engine is lost."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest
from msgspec.structs import asdict

from engine_adapters.reference import pushing
from engine_adapters.reference.engine import EngineBusyError
from engine_adapters.reference.handoff_options import count_push
from engine_adapters.reference.metrics import Metrics
from engine_adapters.reference.request import State
from engine_adapters.reference.sampler import Sampling
from engine_adapters.reference.scheduler import Limits
from kvstore.handoff import prefill as prefill_side
from kvstore.handoff import staging
from kvstore.handoff.memory import landing_places
from kvstore.handoff.places import AUX_PLANE
from kvstore.handoff.states import HandoffFailure, HandoffProgress, HandoffSide, Layer
from kvstore.mover.memory import memory_at
from kvstore.mover.ranges import Places, digest_ranges
from kvstore.protocol.errors import InvalidArgument
from tests.conftest import WaitUntil
from tests.engine_adapters.reference.conftest import Ask, MakeEngine
from tests.engine_adapters.reference.fake_store import FakeNode, FakeStore
from tests.engine_adapters.reference.pushed import OPTIONS, PushPair, kept_hashes, pair_of, report

TEXT = (
    "Whoever stops, dies, or changes a byte on the way costs a request time, not its tokens. " * 5
)


class Gate:
    """Prefill's writer waits before it sends ranges, as long as the gate is closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        real = staging.Staging.read

        def gated(*arguments):  # type: ignore[no-untyped-def]
            self.reached.set()
            assert self.opened.wait(20.0), "the test never opened the gate"
            return real(*arguments)

        monkeypatch.setattr(staging.Staging, "read", gated)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


@pytest.fixture
def pair(gate: Gate, make_engine: MakeEngine, ask: Ask) -> Iterator[PushPair]:
    """Engines that stand in the middle of a push; the gate is open when they are closed."""
    yield pair_of(make_engine, ask)
    gate.opened.set()


def free(pair: PushPair) -> list[int]:
    """Free blocks of both engines, with those that are only in the prefix tree."""
    return [engine.parts.scheduler.available for engine in (pair.prefill, pair.decode)]


def test_an_abort_at_decode_ends_prefills_work_and_costs_others_nothing(
    pair: PushPair, gate: Gate, wait_until: WaitUntil
) -> None:
    here, there = pair.ask(TEXT[:200])
    assert gate.reached.wait(10.0)
    other = pair.ask(TEXT[3:130], name="other")
    pair.decode.abort(there.request)
    wait_until(lambda: there.request.state is State.FINISHED)
    assert free(pair)[1] < 256, "bytes may still arrive in its blocks"
    gate.opened.set()

    assert report(here.wait()) == ("failed", "aborted")
    assert len(other[1].wait().tokens) == 16
    assert report(other[0].wait()) == report(other[1]) == ("success", None)
    wait_until(lambda: free(pair) == [256, 256])
    assert pair.decode.metrics.handoffs.labels("failed", "aborted")._value.get() == 1


def test_an_abort_at_prefill_leaves_decode_to_go_on_by_itself(
    pair: PushPair, gate: Gate, ask: Ask, make_engine: MakeEngine, wait_until: WaitUntil
) -> None:
    here, there = pair.ask(TEXT[:200])
    assert gate.reached.wait(10.0)
    pair.prefill.abort(here.request)
    wait_until(lambda: here.request.state is State.FINISHED)
    assert free(pair)[0] < 256, "its blocks may still be read"
    gate.opened.set()

    assert there.wait().tokens == ask(make_engine(), TEXT[:200], 16).wait().tokens
    assert report(there) == ("failed", "aborted")
    wait_until(lambda: free(pair) == [256, 256])


def test_an_abort_before_anything_was_announced_leaves_nothing(
    make_engine: MakeEngine, ask: Ask, wait_until: WaitUntil
) -> None:
    pair = pair_of(make_engine, ask)
    here = pair.ask_prefill(TEXT[:100], 2_000)
    wait_until(lambda: here.request.state is State.BOOTSTRAP)
    pair.prefill.abort(here.request)
    wait_until(lambda: not pair.prefill.handoffs())
    there = pair.ask_decode(TEXT[:100], 2_000)

    assert there.wait().tokens == ask(make_engine(), TEXT[:100], 16).wait().tokens
    assert report(there) == ("failed", "refused")


def test_decode_that_waits_for_memory_may_be_aborted(
    make_engine: MakeEngine, ask: Ask, wait_until: WaitUntil
) -> None:
    pair = pair_of(make_engine, ask, decode={"blocks": 40})
    running = ask(pair.decode, TEXT[:200], 400)
    running.next()
    here, there = pair.ask(TEXT[:380])
    wait_until(lambda: there.request.state is State.PREALLOC)
    pair.decode.abort(there.request)

    assert report(here.wait()) == ("failed", "aborted")
    assert here.tokens == []
    assert here.finish_reason == "handoff_failed"
    assert len(running.wait().tokens) == 400


def test_when_prefill_closes_in_the_middle_decode_goes_on_by_itself(
    pair: PushPair, gate: Gate, ask: Ask, make_engine: MakeEngine
) -> None:
    here, there = pair.ask(TEXT[:200])
    assert gate.reached.wait(10.0)
    closer = threading.Thread(target=pair.prefill.close)
    closer.start()

    assert there.wait().tokens == ask(make_engine(), TEXT[:200], 16).wait().tokens
    assert report(there) == ("failed", "peer_closed")
    gate.opened.set()
    assert here.wait().finish_reason == "shutdown"
    closer.join(10.0)
    assert not closer.is_alive()


def test_when_decode_closes_in_the_middle_prefill_answers_and_stops(
    pair: PushPair, gate: Gate
) -> None:
    here, there = pair.ask(TEXT[:200])
    assert gate.reached.wait(10.0)
    closer = threading.Thread(target=pair.decode.close)
    closer.start()
    gate.opened.set()

    assert there.wait().finish_reason == "shutdown"
    state, code = report(here.wait())
    assert (state, code in ("peer_closed", "aborted", "closed")) == ("failed", True)
    closer.join(10.0)
    assert not closer.is_alive()


def test_a_push_that_fails_at_its_end_answers_as_a_handoff_through_the_store(
    gate: Gate, make_engine: MakeEngine, ask: Ask, wait_until: WaitUntil
) -> None:
    node = FakeNode()
    pair = pair_of(make_engine, ask, (FakeStore(node), None))
    here, there = pair.ask(TEXT[:200])
    wait_until(lambda: here.request.state is State.INFLIGHT)
    pair.decode.abort(there.request)
    wait_until(lambda: there.request.state is State.FINISHED)
    gate.opened.set()

    assert report(here.wait()) == ("failed", "aborted")
    assert here.finish_reason == "length"
    later = make_engine(FakeStore(node), mode="decode")
    answer = ask(later, TEXT[:200], 16, from_handoff=here.handoff).wait()
    assert answer.request.timings.restored_tokens == 200


def test_another_secret_is_refused_and_the_request_computed(
    make_engine: MakeEngine, ask: Ask
) -> None:
    strange = replace(OPTIONS, secret=b"another secret, of 32 bytes too.")
    brief = replace(OPTIONS, patience=replace(OPTIONS.patience, bootstrapping_s=1.0))
    sides = {"prefill": {"handoff": brief}, "decode": {"handoff": strange}}
    pair = pair_of(make_engine, ask, **sides)
    here, there = pair.ask(TEXT[:200])

    assert there.wait().tokens == ask(make_engine(), TEXT[:200], 16).wait().tokens
    assert report(there) == ("failed", "unreachable")
    assert report(here.wait()) == ("failed", "deadline")
    assert here.tokens == []


def test_another_model_is_refused_and_the_request_computed(
    make_engine: MakeEngine, ask: Ask
) -> None:
    brief = replace(OPTIONS, patience=replace(OPTIONS.patience, bootstrapping_s=1.0))
    sides = {"prefill": {"handoff": brief}, "decode": {"page_tokens": 32}}
    pair = pair_of(make_engine, ask, **sides)
    _, there = pair.ask(TEXT[:200])

    assert there.wait().tokens == ask(make_engine(), TEXT[:200], 16).wait().tokens
    assert report(there)[0] == "failed"


def test_a_room_is_used_once_at_each_engine(make_engine: MakeEngine, ask: Ask) -> None:
    pair = pair_of(make_engine, ask)
    for asked in (pair.ask_prefill, pair.ask_decode):
        asked(TEXT[:50], 2_001)
        with pytest.raises(InvalidArgument, match="room"):
            asked(TEXT[:50], 2_001)


@pytest.mark.parametrize("verified", [True, False], ids=["verified", "verification off"])
def test_a_byte_flipped_on_the_way_changes_kv_only_when_verification_is_off(
    make_engine: MakeEngine, ask: Ask, monkeypatch: pytest.MonkeyPatch, verified: bool
) -> None:
    mono = make_engine()
    expected = ask(mono, TEXT[:200], 16).wait().tokens
    pair = pair_of(make_engine, ask)
    real = staging.Staging.land

    def flipping(self, pool, aux, landing, receive, staged):  # type: ignore[no-untyped-def]
        """As if the bytes had come so: they change before they are digested, or unseen after."""

        def changed(places: Places, seeds: bytes) -> bytes:
            receive(places, seeds)
            for place in places:  # every float is a NaN, in the unused rows too
                memory_at(*place)[:] = b"\xff" * place[1]
            return digest_ranges(places, seeds)

        if verified:
            return real(self, pool, aux, landing, changed, staged)
        real(self, pool, aux, landing, receive, staged)
        if landing.ranges[0].plane != AUX_PLANE:
            memory = memory_at(landing_places(pool, aux, landing)[0][0] + 35, 1)
            memory[0] = memory[0] ^ 0xFF
        return True

    monkeypatch.setattr(staging.Staging, "land", flipping)
    _, there = pair.ask(TEXT[:200])
    there.wait()
    here_hashes, there_hashes = kept_hashes(pair)
    if verified:
        assert there.tokens == expected
        assert report(there) == ("failed", "digest")
        assert there_hashes == mono.kv_hashes("request")
    else:
        assert report(there) == ("success", None)
        assert there_hashes != here_hashes
        assert there_hashes != mono.kv_hashes("request")


@pytest.mark.parametrize("says", [True, False], ids=["another prompt", "no digest"])
def test_kv_that_are_not_proved_to_be_of_the_prompt_are_not_used(
    make_engine: MakeEngine, ask: Ask, monkeypatch: pytest.MonkeyPatch, says: bool
) -> None:
    mine, other = TEXT[:200], TEXT[7:207] if says else TEXT[:200]
    if not says:
        monkeypatch.setattr(pushing, "prompt_digest", lambda _: b"")
    mono = make_engine()
    expected = ask(mono, mine, 16).wait().tokens
    pair = pair_of(make_engine, ask)
    here = pair.ask_prefill(other, 2_002)
    there = pair.ask_decode(mine, 2_002).wait()

    assert there.tokens == expected
    assert report(there) == ("failed", "wrong_prompt")
    assert report(here.wait()) == ("success", None)
    assert there.request.timings.pushed_tokens == 0
    assert pair.decode.kv_hashes("request") == mono.kv_hashes("request")
    assert pair.decode.metrics.handoffs.labels("failed", "wrong_prompt")._value.get() == 1
    assert ask(pair.decode, mine, 16).wait().tokens == expected, "the prefix tree has no other K/V"


@pytest.mark.parametrize(
    "wrong",
    [{"seed": 1 << 63}, {"seed": (1 << 64) - 1}, {"seed": -1},
     {"first_token": 1 << 40}, {"first_token": -1}, {"position": 7}, {"cached_tokens": 91},
     {"cached_tokens": -1}, {"logprobs": {7: -1.0}}, {"logprobs": {-1: float("nan")}}],
    ids=str,
)  # fmt: skip
def test_aux_data_that_make_no_sense_are_a_failed_push_and_the_engine_goes_on(
    make_engine: MakeEngine, ask: Ask, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, object]
) -> None:
    monkeypatch.setattr(
        prefill_side, "encode_aux", lambda aux: msgspec.msgpack.encode(asdict(aux) | wrong)
    )
    sampling = Sampling(temperature=0.9, seed=11)
    expected = ask(make_engine(), TEXT[:90], 12, sampling).wait().tokens
    pair = pair_of(make_engine, ask)
    _, there = pair.ask(TEXT[:90], 12, sampling)

    assert there.wait().tokens == expected
    assert report(there) == ("failed", "protocol")
    assert pair.decode.alive


def test_codes_that_a_peer_makes_up_are_counted_as_one() -> None:
    metrics = Metrics()
    for number in range(50):
        progress = HandoffProgress(OPTIONS.patience, 0)
        code, layer = f"made up {number}", Layer.PROTOCOL
        progress.fail(HandoffFailure(code, HandoffSide.PREFILL, 0, layer, "for a test"), 0)
        count_push(metrics, progress)
    assert metrics.handoffs.labels("failed", "other")._value.get() == 50
    assert b"made up" not in metrics.text()


def test_an_abort_does_not_wait_for_a_step_thread_that_reads_nothing(
    make_engine: MakeEngine, ask: Ask, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    engine = make_engine(limits=Limits(waiting_max=2, running_max=1))
    stands, goes_on = threading.Event(), threading.Event()
    real = engine._steps.step

    def standing() -> None:
        stands.set()
        assert goes_on.wait(20.0)
        real()

    monkeypatch.setattr(engine._steps, "step", standing)
    asked = [ask(engine, TEXT[:20], 8, id="first")]
    assert stands.wait(10.0)
    asked += [ask(engine, TEXT[:20], 8) for _ in range(engine._inbox.maxsize)]
    with pytest.raises(EngineBusyError):
        ask(engine, TEXT[:20], 8)
    aborted = threading.Thread(target=lambda: [engine.abort(one.request) for one in asked])
    aborted.start()
    aborted.join(5.0)
    assert not aborted.is_alive(), "the step thread stands, and yet it waits for it"
    goes_on.set()

    wait_until(lambda: all(one.request.state is State.FINISHED for one in asked))
    assert len(ask(engine, TEXT[:20], 8).wait().tokens) == 8
