"""Engines for tests, and a client that waits for whole answers."""

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from engine_adapters.reference.engine import Engine
from engine_adapters.reference.handoff_options import HandoffOptions
from engine_adapters.reference.parts import EngineOptions
from engine_adapters.reference.request import Output, Request
from engine_adapters.reference.sampler import Sampling
from engine_adapters.reference.tokenizer import encode
from kvstore.engine.options import Loads
from kvstore.engine.transfer import Transfer

ANSWER_WAIT_S = 20.0


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """The tiny model is faster alone, and two engines do not fight for cores."""
    torch.set_num_threads(1)


@dataclass
class Answer:
    """A request on its way; ``wait`` for the end."""

    request: Request
    outputs: "queue.Queue[Output]" = field(default_factory=queue.Queue)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    handoff: Transfer | None = None

    def next(self) -> Output:
        output = self.outputs.get(timeout=ANSWER_WAIT_S)
        self.tokens += output.tokens
        self.text += output.text
        self.finish_reason = output.finish_reason
        self.handoff = output.handoff
        return output

    def wait(self) -> "Answer":
        while self.finish_reason is None:
            self.next()
        return self


Ask = Callable[..., Answer]


def submit(
    engine: Engine,
    prompt: str | list[int],
    max_tokens: int = 8,
    sampling: Sampling | None = None,
    **fields: Any,
) -> Answer:
    """Submit a request without waiting."""
    tokens = encode(prompt) if isinstance(prompt, str) else list(prompt)
    fields.setdefault("id", "request")
    if fields.get("to_handoff"):
        max_tokens = 1
    outputs: queue.Queue[Output] = queue.Queue()
    request = Request(
        tokens=tokens,
        prompt_tokens=len(tokens),
        max_tokens=max_tokens,
        emit=outputs.put,
        sampling=sampling or Sampling(),
        **fields,
    )
    engine.submit(request)
    return Answer(request, outputs)


@pytest.fixture
def ask() -> Ask:
    """``ask(engine, prompt, max_tokens=8, ...) -> Answer``: submit without waiting."""
    return submit


MakeEngine = Callable[..., Engine]


@contextmanager
def engines() -> Iterator[MakeEngine]:
    """``make(store=None, handoff=None, **options)``: started; closed and checked at the end.

    Everything that is found is loaded, unless ``loads`` says otherwise: what is faster depends on
    the machine.
    """
    made: list[Engine] = []

    def make(store: Any = None, handoff: HandoffOptions | None = None, **options: Any) -> Engine:
        options.setdefault("blocks", 256)
        options.setdefault("loads", Loads.ALWAYS)
        engine = Engine(EngineOptions(model="tiny", **options), store, handoff)
        engine.start()
        made.append(engine)
        return engine

    yield make
    for engine in made:
        assert engine.close(10.0), "an engine did not end in time"
        check_idle(engine)


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """See :func:`engines`."""
    with engines() as make:
        yield make


def check_idle(engine: Engine) -> None:
    """No request is left, and every block is free or in the prefix tree."""
    engine.parts.scheduler.check()
    if engine.parts.queues is not None:
        engine.parts.queues.check()
    assert not list(engine._steps.requests())
    page_blocks = engine.options.page_tokens // engine.options.block_tokens
    kept = 0 if engine.parts.tree is None else len(engine.parts.tree) * page_blocks
    assert engine.parts.allocator.free + kept == engine.parts.allocator.count, "blocks leaked"
