"""Prefill and decode engines in this process that push, and requests that go to both."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from engine_adapters.reference.engine import Engine
from engine_adapters.reference.handoff_options import HandoffOptions
from engine_adapters.reference.request import Push
from engine_adapters.reference.sampler import Sampling
from engine_adapters.reference.scheduler import Limits
from kvstore.handoff.states import Patience
from tests.engine_adapters.reference.conftest import Answer, Ask, MakeEngine

SECRET = b"a secret for tests, of 32 bytes."
PATIENCE = Patience(bootstrapping_s=10, waiting_s=10, transferring_s=5, total_s=30, silence_s=5)
OPTIONS = HandoffOptions(secret=SECRET, patience=PATIENCE)
ROOMS: Iterator[int] = count(1)
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 5
SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=1234)


def registry_of(prefill: Engine) -> str:
    return str(prefill.handoff["push"]["registry"])


@dataclass
class PushPair:
    """A prefill and a decode engine; ``ask`` sends a request to both at once."""

    ask_one: Ask
    prefill: Engine
    decode: Engine

    def ask(
        self,
        prompt: str,
        max_tokens: int = 16,
        sampling: Sampling | None = None,
        *,
        name: str = "request",
        **fields: Any,
    ) -> tuple[Answer, Answer]:
        """Prefill's answer and decode's."""
        room = next(ROOMS)
        here = self.ask_prefill(prompt, room, sampling, name)
        return here, self.ask_decode(prompt, room, max_tokens, sampling, name, **fields)

    def ask_prefill(
        self, prompt: str, room: int, sampling: Sampling | None = None, name: str = "request"
    ) -> Answer:
        return self.ask_one(
            self.prefill, prompt, 1, sampling, id=name, to_handoff=True, push=Push(room)
        )

    def ask_decode(
        self,
        prompt: str,
        room: int,
        max_tokens: int = 16,
        sampling: Sampling | None = None,
        name: str = "request",
        **fields: Any,
    ) -> Answer:
        fields |= {"id": name, "push": Push(room, registry_of(self.prefill))}
        return self.ask_one(self.decode, prompt, max_tokens, sampling, **fields)


def pair_of(
    make_engine: MakeEngine, ask: Ask, stores: Any = (None, None), *,
    prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None,
) -> PushPair:  # fmt: skip
    handoffs = {"handoff": OPTIONS}
    here = make_engine(stores[0], mode="prefill", **(handoffs | (prefill or {})))
    there = make_engine(stores[1], mode="decode", **(handoffs | (decode or {})))
    return PushPair(ask, here, there)


def report(answer: Answer) -> tuple[str, str | None]:
    """How the push went at the engine of an answer: its state and its code."""
    assert answer.handoff is not None
    told = answer.handoff.handoff
    assert told is not None
    assert told.way == "push"
    return told.state, told.code


def kept_hashes(pair: PushPair, name: str = "request") -> list[Any]:
    return [engine.kv_hashes(name) for engine in (pair.prefill, pair.decode)]


def pushed_are_those_of_one_engine(
    make_engine: MakeEngine, ask: Ask, ranks: tuple[int, int], handoff: HandoffOptions
) -> PushPair:
    """Push prompts between engines of so many ranks: tokens and K/V are those of one engine."""
    mono = make_engine(prefix_cache=False)
    small = {"limits": Limits(token_budget=40), "handoff": handoff}
    pair = pair_of(
        make_engine, ask, prefill={"ranks": ranks[0], **small}, decode={"ranks": ranks[1], **small}
    )
    lengths = [1, 15, 16, 65, 200, 390]
    both = [pair.ask(TEXT[:length], 12, SEEDED, name=f"r{length}") for length in lengths]
    for length, (here, there) in zip(lengths, both, strict=True):
        name = f"r{length}"
        expected = ask(mono, TEXT[:length], 12, SEEDED, id=name).wait()
        assert there.wait().tokens == expected.tokens
        assert report(here.wait()) == report(there) == ("success", None)
        assert kept_hashes(pair, name) == [mono.kv_hashes(name)] * 2
    return pair
