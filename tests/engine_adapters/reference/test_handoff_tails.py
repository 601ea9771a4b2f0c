"""Goal: what a request says about another engine's tail is not believed."""

import pytest
from msgspec.structs import replace

from tests.engine_adapters.reference.conftest import Ask, MakeEngine
from tests.engine_adapters.reference.fake_store import FakeNode, FakeStore
from tests.engine_adapters.reference.test_engine_store import TEXT, counted


@pytest.mark.parametrize(
    ("mixed_up", "restored"), [(["tail_key"], 100), (["tail_key", "handoff_id"], 64)]
)
def test_the_tail_of_another_prompt_is_not_taken(
    make_engine: MakeEngine, ask: Ask, mixed_up: list[str], restored: int
) -> None:
    node = FakeNode()
    prefill = make_engine(FakeStore(node), mode="prefill")
    mine, others = (
        ask(prefill, prompt, to_handoff=True).wait().handoff
        for prompt in (TEXT[:100], TEXT[:99] + "?")
    )
    expected = ask(make_engine(), TEXT[:100], 40).wait()
    wrong = replace(mine, **{name: getattr(others, name) for name in mixed_up})
    decode = make_engine(FakeStore(node), mode="decode")
    answer = ask(decode, TEXT[:100], 40, from_handoff=wrong).wait()
    assert answer.tokens == expected.tokens
    assert counted(decode, "restored") == restored


@pytest.mark.parametrize("tokens", [0, 37, 64, 100])
def test_a_wrong_number_of_tokens_in_the_tail_harms_nobody(
    make_engine: MakeEngine, ask: Ask, tokens: int
) -> None:
    node = FakeNode()
    prefill = make_engine(FakeStore(node), mode="prefill")
    handoff = ask(prefill, TEXT[:100], to_handoff=True).wait().handoff
    expected = ask(make_engine(), TEXT[:100], 12).wait()
    decode = make_engine(FakeStore(node), mode="decode")
    wrong = replace(handoff, tail_tokens=tokens)
    assert ask(decode, TEXT[:100], 12, from_handoff=wrong).wait().tokens == expected.tokens
    assert decode.alive
