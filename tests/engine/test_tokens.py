"""Goal: what an engine stores says which tokens it is of, whatever else names its KV."""

import pickle

import pytest

from kvstore.engine.messages import Store
from kvstore.engine.requests import PromptScope, ScheduledRequest
from tests.engine.engine import PAGE, PLAIN, Request, World

TOKENS = list(range(7, 307))
"""Four pages and a rest."""
SALTED = PromptScope((("salt", "a secret"),))
ADAPTED = PromptScope((("lora", "name"),))


def stored(scope: PromptScope, *steps: int) -> list[Store]:
    """What is stored of a request of which so many tokens are computed after each step."""
    world = World()
    asked = Request("r", list(TOKENS), block_hashes=[bytes([n] * 32) for n in range(9)])
    world.side.match(asked, scope, 0)
    blocks = [list(range(1, 11))]
    found = [world.step(ScheduledRequest("r", at, blocks)).stores for at in steps]
    return [one for stores in found for one in stores]


@pytest.mark.parametrize("scope", [PLAIN, SALTED, ADAPTED])
def test_pages_that_are_stored_carry_exactly_their_own_tokens(scope):
    first, second = stored(scope, 2 * PAGE + 1, 300)

    for store, tokens in ((first, TOKENS[: 2 * PAGE]), (second, TOKENS[2 * PAGE : 4 * PAGE])):
        sent = pickle.loads(pickle.dumps(store)).keys  # to the workers of another process
        assert sent.tokens.tolist() == tokens
        assert (sent.tokens.dtype, len(sent.tokens.tobytes())) == ("<u4", 4 * PAGE * len(sent))


def test_what_besides_tokens_names_kv_is_in_the_keys_and_not_in_the_tokens():
    plain, salted, adapted = (stored(scope, 300)[0].keys for scope in (PLAIN, SALTED, ADAPTED))

    assert plain.tokens.tolist() == salted.tokens.tolist() == adapted.tokens.tolist()
    assert len({keys.packed for keys in (plain, salted, adapted)}) == 3
    assert b"secret" not in salted.tokens.tobytes()


def test_pages_with_inputs_that_are_no_tokens_carry_none():
    (store,) = stored(PromptScope(foreign=True), 300)

    assert len(store.keys) == 4
    assert store.keys.tokens is None
