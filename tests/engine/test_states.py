"""Goal: a page with a state is stored only when its block has the state at the page's end."""

from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.results import Hit
from kvstore.engine.identity import Group
from kvstore.engine.requests import ScheduledRequest, Setup
from kvstore.engine.sources import source_blocks
from tests.engine.engine import BOTH, PAGE, PLAIN, Request, World

FULL = Group(index=0, layers=2, block_tokens=PAGE, block_bytes=128, kv_heads=2)
STATES = Group(index=1, layers=2, block_tokens=PAGE, block_bytes=512, kv_heads=1, state=True)
SETUP = Setup("engine", (FULL, STATES), PAGE, PAGE, 1, BOTH)


def test_of_states_only_the_one_at_the_end_of_a_step_is_stored_and_the_last_one_loaded():
    world = World(groups=(FULL, STATES))
    asked = Request("r", list(range(300)))
    world.side.see(asked, PLAIN)
    kv = [1, 2, 3, 4, 5]
    # The blocks of states that a step leaves behind are not of the ends of their pages.
    (store,) = world.step(ScheduledRequest("r", 192, [kv, [0, 50, 51]])).stores
    assert [(p.group, p.first, p.blocks) for p in store.blocks] == [(0, 0, kv[:3]), (1, 2, [51])]
    (store,) = world.step(ScheduledRequest("r", 300, [kv, [0, 50, 51, 52, 53]])).stores
    assert [(p.group, p.first, p.blocks) for p in store.blocks] == [(0, 0, kv[3:4])]

    other = World(groups=(FULL, STATES))
    other.store.answer = Hit(3)
    tokens, _ = other.side.match(asked, PLAIN, 64)
    assert tokens == 128
    other.side.allocated(asked, [kv, [0, 0, 60]], tokens)
    (load,) = other.step().loads
    assert [(p.group, p.first, p.blocks) for p in load.blocks] == [(0, 0, kv[1:3]), (1, 1, [60])]


@given(st.lists(st.integers(1, 3 * PAGE), min_size=1, max_size=12), st.integers(0, 3))
def test_whatever_steps_an_engine_takes_a_stored_state_is_that_of_its_page(steps, kept):
    """An engine as vLLM's: a step writes its last block only, and copies the one before it."""
    tokens, stored = 0, 0
    states: dict[int, int] = {}  # number of a block → tokens whose state it has
    blocks: list[int] = []
    for number, count in enumerate(steps):
        tokens += count
        last = (tokens - 1) // PAGE
        blocks += [0] * (last - len(blocks))
        if len(blocks) == last:
            blocks.append(100 + number)
        states[blocks[last]] = tokens
        end = tokens // PAGE
        if end > stored:
            table = [0 if index < last - kept else block for index, block in enumerate(blocks)]
            kv = list(range(1, last + 2))
            found = source_blocks(SETUP, 1, ScheduledRequest("r", tokens, [kv, table]), stored, end)
            if found is not None:
                (block,) = found.blocks
                assert states[block] == (stored + found.first + 1) * PAGE
            assert (found is not None) == (tokens % PAGE == 0)
            stored = end
