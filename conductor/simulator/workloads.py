"""Synthetic loads: the same name and seed give the same requests on every machine."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Final

from conductor.simulator.trace import BLOCK_TOKENS, TracedRequest, TraceEntry, from_entries


class _Prompts:
    """Prompts with prefixes that they share; block ids are given out once."""

    def __init__(self) -> None:
        self._next = 0

    def fresh(self, tokens: int) -> list[int]:
        """Blocks that nobody has had."""
        count = -(-tokens // BLOCK_TOKENS)
        self._next += count
        return list(range(self._next - count, self._next))


def _entry(at_s: float, tokens: int, output: int, blocks: Sequence[int], who: str) -> TraceEntry:
    count = -(-tokens // BLOCK_TOKENS)
    assert len(blocks) >= count
    return TraceEntry(at_s * 1e3, tokens, output, list(blocks[:count]), who)


def _length(chance: random.Random, median: float, spread: float, most: int) -> int:
    return max(16, min(most, int(median * math.exp(chance.gauss(0.0, spread)))))


def _independent(median: float, spread: float, output: float) -> "_Load":
    def load(chance: random.Random, requests: int) -> list[TraceEntry]:
        prompts, at = _Prompts(), 0.0
        found: list[TraceEntry] = []
        for number in range(requests):
            at += chance.expovariate(1.0)
            tokens = _length(chance, median, spread, 120_000)
            answer = _length(chance, output, 0.8, 2_000)
            found.append(_entry(at, tokens, answer, prompts.fresh(tokens), f"u{number}"))
        return found

    return load


def _mixed(chance: random.Random, requests: int) -> list[TraceEntry]:
    """Nine in ten prompts are short, the tenth is long."""
    prompts, at = _Prompts(), 0.0
    found: list[TraceEntry] = []
    for number in range(requests):
        at += chance.expovariate(1.0)
        long = chance.random() < 0.1
        tokens = _length(chance, 30_000 if long else 700, 0.6, 120_000)
        answer = _length(chance, 300, 0.8, 2_000)
        found.append(_entry(at, tokens, answer, prompts.fresh(tokens), f"u{number}"))
    return found


def _sessions(chance: random.Random, requests: int) -> list[TraceEntry]:
    """Conversations of several turns behind one system prompt; each repeats all before it."""
    prompts, started = _Prompts(), 0.0
    system = prompts.fresh(2 * BLOCK_TOKENS)
    found: list[TraceEntry] = []
    number = 0
    while len(found) < requests:
        number += 1
        started += chance.expovariate(0.25)
        at, blocks = started, system
        for _ in range(min(1 + int(chance.expovariate(0.25)), requests - len(found))):
            blocks = [*blocks, *prompts.fresh(_length(chance, 2_000, 0.8, 30_000))]
            tokens = len(blocks) * BLOCK_TOKENS - chance.randrange(BLOCK_TOKENS // 2)
            found.append(_entry(at, tokens, _length(chance, 250, 0.8, 2_000), blocks, f"s{number}"))
            at += 5.0 + chance.expovariate(1 / 40)
    return found


def _hot(chance: random.Random, requests: int) -> list[TraceEntry]:
    """A few long documents, asked about by many; the first gets half of all questions."""
    prompts, at = _Prompts(), 0.0
    documents = [prompts.fresh(20_000) for _ in range(20)]
    found: list[TraceEntry] = []
    for number in range(requests):
        at += chance.expovariate(2.0)
        which = min(int(chance.expovariate(0.7)), len(documents) - 1)
        blocks = [*documents[which], *prompts.fresh(600)]
        found.append(
            _entry(at, len(documents[which]) * BLOCK_TOKENS + 600, 200, blocks, f"u{number}")
        )
    return found


def _burst(chance: random.Random, requests: int) -> list[TraceEntry]:
    """Quiet, and now and then thirty at once with one long prefix that nobody has yet."""
    prompts, at = _Prompts(), 0.0
    found: list[TraceEntry] = []
    while len(found) < requests:
        document = prompts.fresh(30_000)
        for number in range(min(30, requests - len(found))):
            blocks = [*document, *prompts.fresh(500)]
            when = at + chance.uniform(0.0, 2.0)
            found.append(
                _entry(when, len(document) * BLOCK_TOKENS + 500, 150, blocks, f"b{at}/{number}")
            )
        at += 30.0 + chance.expovariate(1 / 30)
    return found


def _diurnal(chance: random.Random, requests: int) -> list[TraceEntry]:
    """Arrivals rise and fall five to one, twice."""
    found = _sessions(chance, requests)
    last = max(one.timestamp for one in found)

    def bent(at: float) -> float:
        turn = 4 * math.pi * at / last
        return at + last * 0.66 / (4 * math.pi) * math.sin(turn)

    return [
        TraceEntry(
            bent(one.timestamp), one.input_length, one.output_length, one.hash_ids, one.session
        )
        for one in found
    ]


_Load = Callable[[random.Random, int], list[TraceEntry]]
WORKLOADS: Final[dict[str, _Load]] = {
    "short": _independent(400, 0.8, 250),
    "long": _independent(24_000, 0.7, 200),
    "mixed": _mixed,
    "answers": _independent(300, 0.6, 900),
    "sessions": _sessions,
    "hot": _hot,
    "burst": _burst,
    "diurnal": _diurnal,
}
"""By name: short prompts, long ones, both; short ones with long answers; conversations; a few
documents that everybody asks about; bursts with a prefix that is new; conversations by day and
night. About one request a second, so ``speed`` is about the rate."""


def made_up(name: str, requests: int, seed: int = 0) -> list[TracedRequest]:
    """``requests`` requests of a load of :data:`WORKLOADS`, at least 1."""
    assert requests >= 1
    # A seed of text is hashed the same everywhere.
    return from_entries(WORKLOADS[name](random.Random(f"{name}/{seed}"), requests))
