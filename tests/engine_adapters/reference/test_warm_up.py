"""Goal: an engine warms its pushes up by itself and keeps nothing of it; nobody can ask for it."""

from typing import Any

import pytest

from engine_adapters.reference.engine import EngineClosedError
from engine_adapters.reference.warm_up import warm_up
from kvstore.protocol.errors import PeerUnreachable
from tests.engine_adapters.reference.conftest import Ask, MakeEngine
from tests.engine_adapters.reference.fake_store import FakeNode, FakeStore
from tests.engine_adapters.reference.pushed import OPTIONS, kept_hashes, pair_of, report
from tests.engine_adapters.reference.test_http import scenario, service
from tests.engine_adapters.reference.test_http_push import HERE, THERE

TEXT = "Tell me about pages, slots and leases. " * 6


@pytest.mark.parametrize(("ranks", "stored"), [(1, False), (2, False), (1, True)])
def test_a_warm_up_serves_a_fake_push_and_the_next_one_is_real(
    make_engine: MakeEngine, ask: Ask, ranks: int, stored: bool
) -> None:
    node = FakeNode()
    stores = (FakeStore(node), FakeStore(node)) if stored else (None, None)
    expected = ask(make_engine(), TEXT, 6).wait().tokens
    options = {"ranks": ranks}
    pair = pair_of(make_engine, ask, stores, prefill=options, decode=options)
    for engine in (pair.prefill, pair.decode):
        told = warm_up(engine)

        assert (told.way, told.state, told.code, told.fake) == ("push", "success", None, True)
        assert told.bytes < 200, "the aux data"
        assert engine.handoffs() == []
        assert engine.parts.tree is not None
        assert len(engine.parts.tree) == 0
        assert engine.metrics.handoffs.labels("success", "")._value.get() == 0
    assert not node.pages
    here, there = pair.ask(TEXT, 6)
    assert there.wait().tokens == expected
    for one in (here, there):
        assert report(one.wait()) == ("success", None)
        assert one.handoff
        assert one.handoff.handoff
        assert not one.handoff.handoff.fake
    assert kept_hashes(pair)[0] == kept_hashes(pair)[1]


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_a_warm_up_that_does_not_end_is_given_up_and_others_are_served(
    make_engine: MakeEngine, ask: Ask, mode: str
) -> None:
    engine = make_engine(mode=mode, handoff=OPTIONS)
    with pytest.raises(PeerUnreachable, match="did not end"):
        warm_up(engine, timeout_s=0.0)
    assert len(ask(engine, TEXT, 3).wait().tokens) == 3
    assert warm_up(engine).state == "success"
    engine.close()
    with pytest.raises(EngineClosedError):
        warm_up(engine)


@pytest.mark.parametrize(("mode", "right"), [("prefill", HERE), ("decode", THERE)])
def test_an_outside_request_cannot_ask_for_a_push_without_bytes(mode: Any, right: Any) -> None:
    async def run() -> None:
        async with service(mode=mode, handoff=OPTIONS) as s:
            for more, field in (({"fake": True}, "fake"), ({"handoff": "fake"}, "handoff")):
                body = {"prompt": "x", "kv_transfer_params": right | more}
                status, answer = await s.post("/v1/completions", body)
                assert status == 400
                assert field in answer["error"]["message"]
            body = {"prompt": "x", "fake": True, "request_id": "warm-up", "max_tokens": 1}
            assert "kv_transfer_params" not in await s.complete(**body)

    scenario(run)
