"""Goal: an engine that dies or stops in any state of a push costs the other one time, no tokens."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster_processes.gated_engine import BEGINNING
from tests.cluster_processes.push_scenes import (
    ANSWER_S,
    BACK_S,
    Asked,
    PushEngine,
    PushScene,
    outcome_of,
    tokens_of,
)
from tests.conftest import Spawn, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
KILL, STOP = signal.SIGKILL, signal.SIGSTOP

STATES = {
    "bootstrapping, no link": ("prefill", "greet"),
    "bootstrapping": ("decode", "announce"),
    "waiting for input": ("prefill", "start"),
    "transferring, a middle layer": ("prefill", "layer"),
    "transferring, within a range": ("prefill", "range"),
    "transferring, before the aux data": ("prefill", "aux"),
    "success, not used yet": ("decode", "success"),
}
"""Each state, who is held in it, and at which gate."""


@pytest.fixture
def scene(spawn: Spawn, tmp_path: Path) -> Iterator[PushScene]:
    made = PushScene(spawn, tmp_path)
    yield made
    made.end()


def prompt_of(state: str) -> str:
    return (
        f"{BEGINNING}{state} something ends, stops, or is given up, and nobody else notices. " * 6
    )[:270]


def at_gate(scene: PushScene, state: str) -> tuple[Asked, PushEngine]:
    """A push that is held in a state; the engine that is held."""
    side, gate = STATES[state]
    engine = scene.prefill if side == "prefill" else scene.decode
    engine.close_gate(gate)
    asked = scene.ask(prompt_of(state))
    engine.at_gate(gate)
    if state == "bootstrapping":
        met = lambda: all(  # noqa: E731
            one["missing_ranks"] == []
            for side in (scene.prefill, scene.decode)
            for one in side.handoffs()
        )
        assert wait_for(met), "the two have spoken of it"
    if state == "transferring, a middle layer":
        arrived = lambda: any(one["bytes"] for one in scene.decode.handoffs())  # noqa: E731
        assert wait_for(arrived), "its first layers arrive meanwhile"
    return asked, engine


class Bystanders:
    """Requests of others that run while a fault happens, and what they must get."""

    def __init__(self, scene: PushScene, survivor: PushEngine) -> None:
        self._survivor = survivor
        self._prompt = "Others do not notice, and get the tokens that they get on any day. " * 2
        self._pushed = None
        self._expected = scene.other.complete(self._prompt, 60)["choices"][0]["token_ids"]
        self._plain = scene.threads.submit(survivor.complete, self._prompt, 60)
        if survivor is scene.decode:
            self._pushed = scene.ask_other(self._prompt)

    def check(self, state: str) -> None:
        assert tokens_of(self._plain) == self._expected, state
        if self._pushed is not None:
            assert tokens_of(self._pushed.decode) == self._expected[:8], state
            assert outcome_of(self._pushed.decode) == ("success", None), state


def back(survivor: PushEngine, before: tuple[int, int], state: str) -> None:
    """Everything that it held for the push is back."""
    assert wait_for(lambda: not survivor.held(), BACK_S), (state, survivor.held())

    def as_before() -> bool:
        now = survivor.threads_and_descriptors()
        return now[0] <= before[0] and now[1] <= before[1]

    assert wait_for(as_before, BACK_S), (state, before, survivor.threads_and_descriptors())


def strike(
    scene: PushScene, number: signal.Signals, victim: PushEngine, survivor: PushEngine, state: str
) -> Asked:
    """Hold a push in a state, kill or stop one of its engines; returns the push."""
    before = survivor.threads_and_descriptors()  # there is no link between the two
    others = Bystanders(scene, survivor)
    asked, held = at_gate(scene, state)
    pids = [one.pid for one in scene.engines if one is not victim]
    victim.signal(number)
    if held is survivor:
        held.open_gate(STATES[state][1])
    others.check(state)
    cause = {KILL: "peer_closed", STOP: "peer_silent"}[number]
    if survivor is scene.decode:
        expected = scene.other.complete(prompt_of(state), 8)["choices"][0]["token_ids"]
        assert tokens_of(asked.decode) == expected, state
        wanted = {
            "bootstrapping, no link": ("failed", "unreachable"),
            "success, not used yet": ("success", None),
        }.get(state, ("failed", cause))
        assert outcome_of(asked.decode) == wanted, state
    elif state == "success, not used yet":
        assert outcome_of(asked.prefill) == ("success", None)
    else:
        told = asked.prefill.result(ANSWER_S)
        wanted = ("failed", "deadline" if state == "bootstrapping, no link" else cause)
        assert outcome_of(asked.prefill) == wanted, state
        if number is KILL and STATES[state][1] in ("announce", "start", "layer"):
            assert told["choices"][0]["finish_reason"] == "handoff_failed", state
    back(survivor, before, state)
    assert [one.pid for one in scene.engines if one is not victim and one.runs] == pids, state
    return asked


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_engine_that_is_killed_in_any_state_costs_the_other_one_time_only(
    scene: PushScene, side: str
) -> None:
    both = [scene.prefill, scene.decode]
    victim, survivor = both if side == "prefill" else both[::-1]
    tokens_of(scene.ask_other("The link to the other one stays. ").decode)
    for state in STATES:
        asked = strike(scene, KILL, victim, survivor, state)
        lost = asked.prefill if side == "prefill" else asked.decode
        assert lost.exception(ANSWER_S) is not None
        victim.start()

    last = scene.ask(prompt_of("the end"))  # it has its old address, and another boot
    expected = scene.other.complete(prompt_of("the end"), 8)["choices"][0]["token_ids"]
    assert tokens_of(last.decode) == expected
    assert outcome_of(last.decode) == outcome_of(last.prefill) == ("success", None)


@pytest.mark.soak("handoff", minutes=2)
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_engine_that_stops_in_any_state_costs_the_other_one_time_only(
    scene: PushScene, side: str
) -> None:
    both = [scene.prefill, scene.decode]
    victim, survivor = both if side == "prefill" else both[::-1]
    tokens_of(scene.ask_other("The link to the other one stays. ").decode)
    for state in STATES:
        before = victim.threads_and_descriptors()
        asked = strike(scene, STOP, victim, survivor, state)
        victim.signal(signal.SIGCONT)
        if STATES[state][0] == side:
            victim.open_gate(STATES[state][1])
        if side == "decode":
            expected = scene.other.complete(prompt_of(state), 8)["choices"][0]["token_ids"]
            assert tokens_of(asked.decode) == expected, "it goes on by itself later"
        asked.prefill.result(ANSWER_S)
        back(victim, before, state)
