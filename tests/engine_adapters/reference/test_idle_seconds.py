"""Goal: an engine tells for how long it had nothing to compute."""

from engine_adapters.reference.engine import Engine
from engine_adapters.reference.request import Output, Request
from tests.conftest import WaitUntil
from tests.engine_adapters.reference.conftest import Ask, MakeEngine
from tests.engine_adapters.reference.fake_store import FakeNode, FakeStore


def idle_s(engine: Engine) -> float:
    value: float = engine.metrics.idle_seconds._value.get()
    return value


def test_an_engine_that_computes_is_not_idle(
    make_engine: MakeEngine, wait_until: WaitUntil
) -> None:
    engine = make_engine()
    wait_until(lambda: idle_s(engine) > 0)
    seen, ended = list[float](), list[Output]()

    def emit(output: Output) -> None:  # in the step thread: between two steps
        seen.append(idle_s(engine))
        if output.finish_reason is not None:
            ended.append(output)

    engine.submit(Request(id="r", tokens=[65] * 300, prompt_tokens=300, max_tokens=30, emit=emit))
    wait_until(lambda: bool(ended))
    assert len(seen) >= 30
    assert len(set(seen)) == 1, "it was idle during an answer"
    wait_until(lambda: idle_s(engine) > seen[-1])


def test_an_engine_that_waits_for_its_puts_is_idle(
    make_engine: MakeEngine, ask: Ask, wait_until: WaitUntil
) -> None:
    node = FakeNode()
    engine = make_engine(FakeStore(node), mode="prefill")
    node.gate.clear()
    answer = ask(engine, "x" * 200, to_handoff=True)
    wait_until(lambda: counted_steps(engine) > 0)
    before = idle_s(engine)
    wait_until(lambda: idle_s(engine) > before)
    assert answer.outputs.empty(), "its answer did not wait for the put"
    node.gate.set()
    answer.wait()


def counted_steps(engine: Engine) -> float:
    found: float = engine.metrics.step_seconds._sum.get()
    return found
