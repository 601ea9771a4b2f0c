"""Prompts that are priced in a block, behind those thought of before, cost what numbers say."""

from collections.abc import Mapping
from math import inf

import numpy as np
import pytest

from conductor.costs.prior import PrefillLine
from conductor.routing.columns import Column, CostColumns, CostInputs, StepColumns, Terms
from conductor.routing.computing import Prompt, computing, prompt_columns
from conductor.routing.groups import PairRows, pair_rows
from conductor.routing.policy import sooner
from conductor.routing.pricing import Block, Prices
from conductor.routing.together import STEP_TOKENS, shared_s
from kvstore.index.layout import Words

ENGINES = 7
CHOICES = pair_rows([([4], []), ([2, 0, 3], [5, 6, 1])])
"""One that serves alone, and three that hand over."""
PAGES, PAGE_TOKENS = 40, 64
TOKENS = PAGES * PAGE_TOKENS + 63


def _costs(random: np.random.Generator) -> CostColumns:
    inputs: CostInputs[Column] = CostInputs._make(
        random.random((len(CostInputs._fields), ENGINES)) * 1e-4
    )
    late = random.integers(0, 2, ENGINES).astype(np.float64)
    return CostColumns(
        backlog_s=np.array([0.0, 0.3, 0.2, 0.1, 0.0, 0.4, 0.4]),
        steps=StepColumns(*np.array([[0.0, 0, 0.1, 0, 0, 0, 0]] * 3) * [[1], [5_000], [10]]),
        leaving_s=random.random(ENGINES) * 0.2,
        inputs=inputs._replace(
            kv_room=np.where(random.random(ENGINES) < 0.5, TOKENS / 2, inf),
            others_s=np.zeros(ENGINES),
            network_bytes_per_s=random.random(ENGINES) * 1e4 + 1.0,
            late_per_s=late, late_per_s2=late * 3.0, late_most=late * 0.01,
        ),
        usual_s=0.7,
    )  # fmt: skip


def _prompts(random: np.random.Generator, keys: Words) -> list[Prompt]:
    """Prompts that have some pages in common."""
    prompts = []
    for number in range(1, 40):
        own = keys.copy()
        own[random.integers(0, PAGES + 1) :] += np.uint64(number)
        usable = random.integers(0, PAGES // 2, ENGINES) * float(PAGE_TOKENS)
        peer = usable * (number % 3 == 0)
        prompts.append(Prompt(TOKENS, usable, peer, usable, None, own, 50.0))
    return prompts


class Plain:
    """The same, one engine after another."""

    def __init__(self, costs: CostColumns) -> None:
        self.costs = costs
        self.queue_s = (costs.backlog_s + costs.inputs.others_s).tolist()
        self.tokens = costs.steps.tokens.tolist()
        self.given: list[tuple[int, Words]] = []

    def think(self, row: int, seconds: float, new_tokens: float, keys: Words) -> None:
        if self.queue_s[row]:
            joins = self.tokens[row] and self.tokens[row] + new_tokens <= STEP_TOKENS
            self.tokens[row] = new_tokens + (self.tokens[row] if joins else 0.0)
        self.queue_s[row] += seconds
        self.given = [*self.given[-7:], (row, keys)]

    def expected(self, prompt: Prompt) -> Mapping[int, float]:
        expected = dict[int, float]()
        for row, keys in self.given:
            same = int(np.argmin(np.append(keys == prompt.keys, [False])))
            most = max(same * float(PAGE_TOKENS), expected.get(row, 0.0))
            if most > prompt.usable[row]:
                expected[row] = most
        return expected

    def terms(self, prompt: Prompt, choices: PairRows) -> Terms:
        rows, inputs = choices.rows, self.costs.inputs
        fixed = CostInputs[Column]._make([one.take(rows) for one in inputs])
        known = computing(
            prompt_columns([prompt]), rows, fixed, fixed.coming_bytes, sooner,
            self.expected(prompt),
        ).of(0)  # fmt: skip
        return Terms._make(
            np.array(
                [
                    self._at(prompt, choices, at, [column[at] for column in known[:3]])
                    for at in range(len(rows))
                ]
            ).T
        )

    def _at(
        self, prompt: Prompt, choices: PairRows, at: int, known: list[float]
    ) -> tuple[float, ...]:
        row = choices.firsts[at]
        one = CostInputs[float]._make([column[row] for column in self.costs.inputs])
        fetch_s, own_s, prefix = max(known[0] - self.costs.backlog_s[row], 0.0), known[1], known[2]
        queue_s, new_tokens = self.queue_s[row], TOKENS - prefix
        handoff_s, step_s = 0.0, one.step_s
        for mine, decode in choices.parts:
            if mine.start <= at < mine.stop:
                computed_s = queue_s + fetch_s + own_s
                handoff_s, step_s = self._handoff(prompt, row, decode.tolist(), computed_s)
        before = self.tokens[row]
        if before and before + new_tokens <= STEP_TOKENS and not fetch_s:
            line = PrefillLine(one.constant_s, one.floor_s, one.token_s, 0.0)
            own_s = max(own_s - shared_s(line, before, new_tokens), 0.0)
        late = min(one.late_most, own_s * (one.late_per_s + own_s * one.late_per_s2))
        return queue_s, fetch_s, own_s, handoff_s, step_s, late * self.costs.usual_s

    def _handoff(
        self, prompt: Prompt, row: int, decode: list[int], computed_s: float
    ) -> tuple[float, float]:
        """Seconds to the best decode engine, and of its steps."""
        found, inputs = [], self.costs.inputs
        for to in decode:
            moved = TOKENS - prompt.held[to]
            size = moved * inputs.token_bytes[to] + inputs.coming_bytes[to]
            comes_s = inputs.handoff_factor[to] * size / inputs.network_bytes_per_s[to]
            comes_s = inputs.handoff_s[to] + comes_s
            full = inputs.kv_room[to] < TOKENS + prompt.output
            found.append((full, comes_s + prompt.output * inputs.step_s[to], to, comes_s, moved))
        _, _, to, comes_s, moved = min(found)
        token_s = inputs.token_bytes[row] / inputs.network_bytes_per_s[row]
        before_s = max(self.costs.leaving_s[row] - computed_s, 0.0)
        sent_s = inputs.handoff_s[to] + before_s + inputs.handoff_factor[to] * moved * token_s
        return max(comes_s, sent_s), inputs.step_s[to]


@pytest.mark.parametrize("seed", range(4))
def test_prompts_of_a_block_cost_what_each_would_alone_to_the_last_bit(seed: int) -> None:
    random = np.random.default_rng(seed)
    costs = _costs(random)
    prompts = _prompts(random, random.integers(1, 1 << 63, PAGES, dtype=np.uint64))
    prices, plain = Prices(costs, sooner), Plain(costs)
    block = prices.block(prompts, CHOICES)
    expected = shared = 0
    for row, prompt in enumerate(prompts):
        priced, terms = prices.priced(block, row), plain.terms(prompt, CHOICES)
        for name, mine, its in zip(Terms._fields, priced.terms, terms, strict=True):
            assert mine.tolist() == its.tolist(), (row, name)
        expected += len(plain.expected(prompt))
        at = int(random.integers(0, len(CHOICES.firsts)))
        shared += priced.shared_s(at) > 0
        given = (CHOICES.firsts[at], float(terms.prefill_s[at]), priced.new_tokens(at), prompt.keys)
        prices.think(*given)
        plain.think(*given)
    assert expected > 10
    assert shared > 0


def test_a_block_after_an_assignment_is_as_if_it_were_priced_then() -> None:
    random = np.random.default_rng(9)
    prompts = _prompts(random, random.integers(1, 1 << 63, PAGES, dtype=np.uint64))
    prices = Prices(_costs(random), sooner)
    before = prices.block(prompts, CHOICES)
    prices.give(0, 0.25, 700.0, prompts[0].keys)
    prices.send(0, 5, prompts[0])
    fewer = pair_rows([([4], []), ([2, 0, 3], [6, 1])])
    for choices in (CHOICES, fewer):
        again, anew = prices.again(before, choices), prices.block(prompts, choices)
        assert again.choices is choices
        assert _bytes(again) == _bytes(anew)
    assert _bytes(before) != _bytes(anew)


def _bytes(block: Block) -> list[bytes]:
    times = (*block.own.known, *block.own[1:], block.tbt_s, block.handoffs, block.leaving_s)
    return [np.asarray(one).tobytes() for one in times]
