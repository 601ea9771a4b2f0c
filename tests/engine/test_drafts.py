"""Goal: of an engine with a draft layer, a page is stored only if its KV are those of its key.

The engine of the model is as vLLM's: it shares blocks that have the same tokens, whatever comes
after them; it leaves the draft out of some steps; at the end of a part of a prompt it takes a wrong
next token; with a step in flight it counts drafts as computed that are not accepted in the end.
"""

from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvstore.client.results import Hit
from kvstore.engine.chain import Chain, ShiftedChain
from kvstore.engine.drafts import DraftBlocks
from kvstore.engine.hints import FetchHint
from kvstore.engine.messages import Blocks, Load
from kvstore.engine.requests import PromptScope, ScheduledRequest
from kvstore.engine.states import RequestState
from kvstore.protocol.page import PrefixKeys
from tests.engine.engine import FULL, PAGE, PLAIN, Request, World

B, P = 2, 4
"""Tokens of a block, and of a page."""
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=20)


@given(TOKENS, TOKENS, st.lists(st.integers(1, 20), max_size=4))
def test_a_key_names_the_tokens_of_its_page_and_the_next_one_and_no_others(one, other, parts):
    chain = ShiftedChain(P, [("lora", "a")])
    for part in parts:
        chain.extend(one[:part])
    keys, others = chain.extend(one), ShiftedChain(P, [("lora", "a")]).extend(other)

    assert len(keys) == (len(one) - 1) // P
    assert keys.tokens is None, "those of a page would be another's"
    for page in range(min(len(keys), len(others))):
        end = (page + 1) * P + 1
        assert (keys[page] == others[page]) == (one[:end] == other[:end])
    assert not set(keys) & set(ShiftedChain(P, []).extend(one)), "of other weights"
    assert not set(keys) & set(Chain(P).extend(one)), "of an engine without a draft"
    assert not set(keys) & set(Chain(P).extend(one[1:]))


@dataclass
class Running:
    """A request of the model's engine."""

    name: str
    tokens: list[int]
    table: list[int] = field(default_factory=list)
    computed: int = 0
    fresh: bool = True
    usable: bool = True
    told: int = 0
    """Tokens that are known while the last step is in flight."""


def known(tokens: list[int]) -> RequestState:
    """A request of which these tokens are known."""
    return RequestState(Request("r", tokens), PLAIN, ShiftedChain(P, []), FetchHint())


class Engine(RuleBasedStateMachine):
    """Requests, blocks, and for each token of a block the next one that its KV are of."""

    @initialize()
    def begin(self) -> None:
        self.blocks = DraftBlocks(msgspec.structs.replace(FULL, block_tokens=B), P)
        self.blocks.resize(200)
        self.kv: dict[tuple[int, int], object] = {}
        self.shared: dict[tuple[int, ...], int] = {}
        self.free = list(range(1, 200))
        self.running: dict[str, Running] = {}
        self.number = 0
        self.loads = 0

    def allocate(self, one: Running, tokens: int) -> None:
        while len(one.table) * B < tokens:
            one.table.append(self.free.pop(0))

    @rule(tokens=TOKENS, usable=st.integers(0, 5), reuse=st.booleans(), load=st.integers(0, 5),
          good=st.integers(0, 5))  # fmt: skip
    def arrives(self, tokens: list[int], usable: int, reuse: bool, load: int, good: int) -> None:
        if len(self.running) >= 4 or len(self.free) < 40:
            return
        self.number += 1
        one = Running(f"r{self.number}", tokens, usable=bool(usable))
        self.running[one.name] = one
        self.restart(one, reuse, load, good)

    def restart(self, one: Running, reuse: bool, load: int, good: int) -> None:
        one.table, one.computed, one.fresh = [], 0, True
        for place in range((len(one.tokens) - 1) // B) if reuse else ():
            found = self.shared.get(tuple(one.tokens[: (place + 1) * B]))
            if found is None:
                break
            one.table.append(found)
        one.computed = len(one.table) * B
        end = min((len(one.tokens) - 1) // P, one.computed // P + load) * P
        if end <= one.computed or not one.usable:
            return
        first = one.computed // P * (P // B)
        self.allocate(one, end)
        table = [0 if at * B < one.computed else one.table[at] for at in range(first, end // B)]
        self.loads += 1
        load = Load(
            job=self.loads, request=one.name, keys=PrefixKeys(b""), blocks=[Blocks(0, 0, table)],
            wait_s=0.0, layerwise=False,
        )  # fmt: skip
        self.blocks.begins_load(load, one.computed // P, known(one.tokens))
        loaded = max(0, min(end, (one.computed // P + good) * P))
        for at in range(one.computed, loaded):
            self.kv[one.table[at // B], at % B] = (at, one.tokens[at + 1])
        self.blocks.ended_load(self.loads, loaded // P - first * B // P)
        one.computed = max(loaded, one.computed)
        del one.table[-(-one.computed // B) :]

    @rule(which=st.integers(0, 3), count=st.integers(1, 9), drafts=st.integers(0, 2),
          accepted=st.integers(0, 2), drafted=st.integers(0, 4), sampled=st.integers(0, 2),
          flight=st.integers(0, 2))  # fmt: skip
    def computes(
        self, which: int, count: int, drafts: int, accepted: int, drafted: int, sampled: int,
        flight: int,
    ) -> None:  # fmt: skip
        if not self.running:
            return
        one = list(self.running.values())[which % len(self.running)]
        count_known = len(one.tokens)
        decodes = count_known - one.computed == 1
        drafts = drafts if decodes else 0
        count = 1 if decodes else min(count, count_known - one.computed)
        if len(one.tokens) > 40 or len(self.free) < 20:
            return
        end = one.computed + count
        written = end + drafts
        self.allocate(one, written + 2)
        ahead = flight if decodes and not one.fresh else 0  # what vLLM takes for accepted so far
        progress = ScheduledRequest(
            one.name, end + ahead, [one.table], one.computed + ahead, written + ahead, one.fresh
        )
        seen = one.tokens[: one.told] if ahead else one.tokens
        state = known(seen) if one.usable else None
        self.blocks.computes(progress, state, drafted=bool(drafted))
        stored = self.stored(one, progress, seen) if one.usable else []
        one.told = count_known
        following = [*one.tokens, *[sampled] * 4]
        for at in range(one.computed, written + 2):
            right = (at, following[at + 1]) if at < end else "a draft's"
            if at == end - 1 and end < count_known:
                right = "a wrong next token"
            if drafted or at >= end:
                self.kv[one.table[at // B], at % B] = right
            else:
                self.kv[one.table[at // B], at % B] = "left from before"
        if end == count_known:
            one.tokens += [sampled] * (1 + min(accepted, drafts))
            for at in range(end, end + min(accepted, drafts)):
                next_token = (at, one.tokens[at + 1])
                self.kv[one.table[at // B], at % B] = next_token if drafted else "left"
            end += min(accepted, drafts)
        for position in stored:
            found = self.kv[one.table[position // B], position % B]
            assert found == (position, one.tokens[position + 1])
        one.computed, one.fresh = end, False
        for place in range(end // B):
            self.shared.setdefault(tuple(one.tokens[: (place + 1) * B]), one.table[place])

    @rule(which=st.integers(0, 3), reuse=st.booleans(), load=st.integers(0, 5),
          good=st.integers(0, 5))  # fmt: skip
    def is_preempted(self, which: int, reuse: bool, load: int, good: int) -> None:
        if self.running and len(self.free) > 40:
            one = list(self.running.values())[which % len(self.running)]
            self.give_back(one)
            self.restart(one, reuse, load, good)

    @rule(which=st.integers(0, 3))
    def ends(self, which: int) -> None:
        if self.running:
            one = self.running.pop(list(self.running)[which % len(self.running)])
            self.blocks.finished(one.name)
            self.give_back(one)

    def give_back(self, one: Running) -> None:
        """Some of its blocks are used again at once, whatever they have in the engine's cache."""
        used = {
            block for other in self.running.values() if other is not one for block in other.table
        }
        for block in one.table[::2]:
            if block not in used and block not in self.free:
                self.shared = {key: value for key, value in self.shared.items() if value != block}
                self.free.insert(0, block)

    def stored(self, one: Running, progress: ScheduledRequest, seen: list[int]) -> list[int]:
        """The tokens whose KV are stored after a step."""
        found: list[int] = []
        pages, first = min(progress.tokens, len(seen) - 1) // P, 0
        while first < pages:
            first, end = self.blocks.right_pages(progress, known(seen), first, pages)
            found += range(first * P, end * P)
            first = end + 1
        return found


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def drafting(**changes) -> World:
    return World(drafts=True, **changes)


def at(name: str, tokens: int, begin: int = 0, *, table=range(1, 20), starts=True):
    return ScheduledRequest(name, tokens, [list(table)], begin, tokens, starts)


def test_a_page_is_stored_when_the_token_after_it_is_known():
    world, tokens = drafting(), list(range(100, 100 + 2 * PAGE))
    asked = Request("r", tokens)
    world.side.see(asked, PLAIN)
    (store,) = world.step(at("r", 2 * PAGE)).stores
    assert (len(store.keys), store.blocks[0].blocks) == (1, [1, 2])

    tokens.append(7)
    (store,) = world.step(at("r", 2 * PAGE + 1, 2 * PAGE, starts=False)).stores
    assert (len(store.keys), store.blocks[0].blocks) == (1, [3, 4])


def test_the_last_page_of_a_prompt_of_whole_pages_is_never_loaded():
    """Its last token's KV depend on a token that is not known: no key says which."""
    world = drafting(takes_whole=True)
    world.store.answer = Hit(9)
    assert world.side.match(Request("r", list(range(2 * PAGE))), PLAIN, 0) == (PAGE, True)
    assert world.side.match(Request("s", list(range(PAGE))), PLAIN, 0) == (0, False)


def test_a_page_at_the_end_of_a_part_of_a_prompt_is_left_out_and_not_promised():
    world, asked = drafting(), Request("r", list(range(5 * PAGE + 1)), {"do_remote_decode": True})
    world.side.see(asked, PLAIN)
    (store,) = world.step(at("r", 2 * PAGE)).stores
    assert store.blocks[0].blocks == [1, 2]
    (store,) = world.step(at("r", 5 * PAGE + 1, 2 * PAGE, starts=False)).stores
    assert store.blocks[0].blocks == [5, 6, 7, 8, 9, 10]

    assert world.side.finished("r")["kvstore_pages"] == 1
    assert world.side.counts.take()["draft_skipped_pages"] == 1


def test_blocks_of_a_step_without_the_draft_are_not_stored():
    world, asked = drafting(), Request("r", list(range(2 * PAGE + 1)))
    world.side.see(asked, PLAIN)
    assert not world.side.build([at("r", 2 * PAGE + 1)], 129, drafted=False).stores


def test_a_shared_block_is_stored_again_only_for_the_next_token_that_it_was_computed_with():
    world, one = drafting(), Request("r", list(range(3 * PAGE)))
    world.side.see(one, PLAIN)
    world.step(at("r", 3 * PAGE))
    world.side.finished("r")
    for last, pages in ((2 * PAGE, 2), (999, 1)):
        other = Request(f"like {last}", [*range(2 * PAGE), last, *range(PAGE)])
        world.side.match(other, PLAIN, 2 * PAGE)
        table = [1, 2, 3, 4, *range(30, 40)]
        step = at(other.request_id, 3 * PAGE, 2 * PAGE, table=table)
        assert [len(store.keys) for store in world.step(step).stores] == [pages]


def test_a_step_in_flight_does_not_hide_where_a_step_without_the_draft_begins():
    """vLLM counts drafts of the step in flight as computed: the one after it begins before that."""
    world, tokens = drafting(), list(range(PAGE - 2))
    asked = Request("r", tokens)
    world.side.see(asked, PLAIN)
    world.step(at("r", PAGE - 2))
    world.side.build([at("r", PAGE + 3, PAGE + 2, starts=False)], 1, drafted=False)
    tokens += range(20)
    assert not world.step(at("r", PAGE + 10, PAGE + 9, starts=False)).stores


def test_a_preempted_request_begins_again_with_other_blocks():
    world, asked = drafting(), Request("r", list(range(2 * PAGE + 1)))
    world.side.see(asked, PLAIN)
    other = Request("s", list(range(2 * PAGE + 1)))
    world.side.see(other, PLAIN)
    world.step(at("s", 2 * PAGE + 1, table=range(30, 40)))
    world.side.finished("s")
    world.step(at("r", PAGE))
    world.side.match(asked, PLAIN, 0)
    world.side.build([at("r", 2 * PAGE + 1, table=range(30, 40))], 129, drafted=False)
    assert not world.step(at("r", 2 * PAGE + 1, 2 * PAGE, table=range(30, 40), starts=False)).stores
    world.side.match(asked, PLAIN, 0)
    (store,) = world.step(at("r", 2 * PAGE + 1, table=range(50, 60))).stores
    assert store.blocks[0].blocks == [50, 51, 52, 53]


def test_a_block_that_a_load_has_written_in_part_is_not_what_it_was():
    world, one = drafting(), Request("r", list(range(2 * PAGE + 1)))
    world.side.see(one, PLAIN)
    world.step(at("r", 2 * PAGE + 1))
    world.side.finished("r")
    again, other = (Request(name, list(range(2 * PAGE + 1))) for name in "st")
    world.store.answer = Hit(2)
    (load,) = world.load(again).loads
    world.ended(load.job, 0)
    world.store.answer = Hit(0)
    world.side.match(other, PLAIN, 2 * PAGE)
    assert not world.step(at("t", 2 * PAGE + 1, 2 * PAGE)).stores


def test_what_was_loaded_is_right_where_it_came_whole():
    world, one = drafting(), Request("r", list(range(3 * PAGE)))
    world.store.answer = Hit(2)
    (load,) = world.load(one).loads
    world.ended(load.job, 1)
    world.side.finished("r")
    other = Request("s", list(range(3 * PAGE)))
    world.store.answer = Hit(0)
    world.side.match(other, PLAIN, 2 * PAGE)
    (store,) = world.step(at("s", 3 * PAGE, 2 * PAGE)).stores
    assert store.blocks[0].blocks == [1, 2]


@pytest.mark.parametrize("scope", [PromptScope(foreign=True), PromptScope(usable=False)])
def test_what_the_engine_names_itself_is_neither_stored_nor_loaded(scope):
    world, one = drafting(), Request("r", list(range(3 * PAGE)))
    world.store.answer = Hit(2)
    world.side.see(one, scope)
    assert world.side.match(one, scope, 0) == (0, False)
    assert not world.step(at("r", 3 * PAGE)).stores


def test_after_new_weights_no_block_of_before_is_stored():
    world, one = drafting(), Request("r", list(range(3 * PAGE)))
    world.side.see(one, PLAIN)
    world.step(at("r", 3 * PAGE))
    world.side.forget_all()
    other = Request("s", list(range(3 * PAGE)))
    world.side.match(other, PLAIN, 2 * PAGE)
    assert not world.step(at("s", 3 * PAGE, 2 * PAGE)).stores
