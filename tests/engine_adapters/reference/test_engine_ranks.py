"""Goal: engines whose K/V heads are split over ranks give the tokens of one, byte for byte."""

import socket
import time

import numpy as np
import pytest

from engine_adapters.reference.handoff_options import HandoffOptions
from kvstore.handoff.states import State
from kvstore.protocol.errors import InvalidArgument
from tests.conftest import WaitUntil
from tests.engine_adapters.reference.conftest import Ask, MakeEngine
from tests.engine_adapters.reference.pushed import (
    OPTIONS,
    SECRET,
    pair_of,
    pushed_are_those_of_one_engine,
    report,
)

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 5
RANKS = [(1, 1), (2, 1), (1, 2), (2, 2)]


@pytest.mark.parametrize("ranks", RANKS, ids=lambda ranks: "{}to{}".format(*ranks))
def test_pushed_tokens_and_kv_are_those_of_one_engine(
    make_engine: MakeEngine, ask: Ask, ranks: tuple[int, int]
) -> None:
    pushed_are_those_of_one_engine(make_engine, ask, ranks, OPTIONS)


def test_ranks_of_one_engine_change_no_token_and_no_hash(make_engine: MakeEngine, ask: Ask) -> None:
    one, two = make_engine(), make_engine(ranks=2)

    assert ask(two, TEXT, 20).wait().tokens == ask(one, TEXT, 20).wait().tokens
    assert two.kv_hashes("request") == one.kv_hashes("request")
    assert ask(two, TEXT + "!", 20).wait().tokens == ask(one, TEXT + "!", 20).wait().tokens


def test_when_one_rank_fails_the_request_is_computed_and_all_blocks_come_back(
    make_engine: MakeEngine, ask: Ask, wait_until: WaitUntil
) -> None:
    pair = pair_of(make_engine, ask, prefill={"ranks": 2}, decode={"ranks": 2})
    there = pair.ask_decode(TEXT[:200], 2_000)
    pushes = pair.decode.parts.pushes
    assert pushes is not None
    wait_until(lambda: [one.state for one in pushes.describe()] == ["WAITING_FOR_INPUT"])
    pushes._managers[1].act(lambda core, now: core.abort(2_000, now))

    assert there.wait().tokens == ask(make_engine(), TEXT[:200], 16).wait().tokens
    assert report(there) == ("failed", "aborted")
    wait_until(lambda: not pushes.describe())


def test_the_rank_that_failed_by_itself_says_why(
    make_engine: MakeEngine, ask: Ask, wait_until: WaitUntil
) -> None:
    pair = pair_of(make_engine, ask, prefill={"ranks": 2}, decode={"ranks": 2})
    there = pair.ask_decode(TEXT[:200], 2_002)
    pushes = pair.decode.parts.pushes
    assert pushes is not None
    wait_until(lambda: [one.state for one in pushes.describe()] == ["WAITING_FOR_INPUT"])
    late_ns = time.monotonic_ns() + 3_600 * 10**9
    pushes._managers[1].act(lambda core, _: core.tick(late_ns))

    there.wait()
    assert report(there) == ("failed", "deadline")


def test_handoffs_of_ranks_are_shown_as_one(make_engine: MakeEngine, ask: Ask) -> None:
    pair = pair_of(make_engine, ask, prefill={"ranks": 2}, decode={"ranks": 2})
    here = pair.ask_prefill(TEXT[:200], 2_001)
    (one,) = pair.prefill.handoffs()

    assert (one.room, one.state, one.missing) == (2_001, State.BOOTSTRAPPING.name, [0])
    pair.ask_decode(TEXT[:200], 2_001).wait()
    assert report(here.wait()) == ("success", None)


@pytest.mark.parametrize("ranks", [3, 0])
def test_ranks_that_cannot_be_are_refused(make_engine: MakeEngine, ranks: int) -> None:
    with pytest.raises(InvalidArgument, match="ranks"):
        make_engine(ranks=ranks)


class OpenTransport:
    transport = "for tests"
    closed = False
    gather_memory = np.zeros(0, dtype=np.uint8)
    staged_address = 0

    def begin(self, *_: object) -> None:
        """Nothing to tell."""

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("what", ["registry", "second rank", "second landing"])
def test_an_engine_that_cannot_start_leaves_no_transport_open(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    made = [OpenTransport(), OpenTransport()]
    for name in ("writers", "landings"):
        monkeypatch.setattr(HandoffOptions, name, lambda *_: made)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = HandoffOptions(secret=SECRET, registry_port=port)
        if what == "second rank":
            options = HandoffOptions(secret=SECRET, port=port - 1)
        mode = "prefill"
        if what == "second landing":
            mode, options = "decode", HandoffOptions(secret=SECRET)
            monkeypatch.setattr(made[1], "begin", None)
        with pytest.raises((InvalidArgument, TypeError)):
            make_engine(mode=mode, ranks=2, handoff=options)
    assert [one.closed for one in made] == [True, True]
