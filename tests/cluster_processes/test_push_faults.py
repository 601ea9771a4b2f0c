"""Goal: an engine that dies or stops in any state of a push costs the other one time, no tokens."""

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from kvstore.handoff.registry import HandoffRegistry, RegistryClient
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
from tests.handoff.test_handoff_faults import Relay, flip

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
PATIENT = ("--handoff-silence", "6")
"""Where nobody is silent, however long a busy machine keeps an engine from its pings."""


@pytest.fixture
def scene(spawn: Spawn, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[PushScene]:
    made = PushScene(spawn, tmp_path, *getattr(request, "param", ()))
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
        met = lambda: any(  # noqa: E731
            one["missing_ranks"] == [] and one["state"] == "bootstrapping"
            for one in scene.prefill.handoffs()
        )
        assert wait_for(met), "prefill has heard of it"
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


@pytest.mark.parametrize("scene", [PATIENT], ids=["patient"], indirect=True)
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
        answered = side == "prefill" and STATES[state][1] == "success"  # before it was killed
        assert lost.exception(ANSWER_S) is not None or answered, state
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


# Who leaves, and who gives up


@pytest.mark.soak("handoff", minutes=2)
@pytest.mark.parametrize("who", ["prefill", "decode", "client"])
def test_a_push_that_is_given_up_in_any_state_costs_nobody_else_anything(
    scene: PushScene, who: str
) -> None:
    tokens_of(scene.ask("Both links stay. ").decode)
    tokens_of(scene.ask_other("Both links stay. ").decode)
    before = [one.threads_and_descriptors() for one in (scene.prefill, scene.decode)]
    pids = [one.pid for one in scene.engines]
    for state, (side, gate) in STATES.items():
        if gate == "greet":
            continue  # there is a link
        others = Bystanders(scene, scene.decode)
        engine = scene.prefill if side == "prefill" else scene.decode
        engine.close_gate(gate)
        asked = scene.ask(prompt_of(state), leaves=True)
        engine.at_gate(gate)
        sides = ["prefill", "decode"] if who == "client" else [who]
        asked.leave(*sides, answered="prefill" if gate == "success" else "")
        if who == "decode" and side == "prefill":  # else all may arrive before its step
            assert wait_for(partial(scene.decode.has_given_up, asked.room)), state
        elif who == "prefill" and gate == "range":  # likewise, all may be sent
            assert wait_for(partial(scene.prefill.has_given_up, asked.room)), state
        engine.open_gate(gate)
        others.check(state)
        if who == "prefill":
            expected = scene.other.complete(prompt_of(state), 8)["choices"][0]["token_ids"]
            assert tokens_of(asked.decode) == expected, state
            done = gate in ("aux", "success")  # perhaps: all KV is there, or nearly
            assert outcome_of(asked.decode) in [("failed", "aborted")] + [("success", None)] * done
        elif who == "decode":
            done = gate == "success"
            wanted = ("success", None) if done else ("failed", "aborted")
            assert outcome_of(asked.prefill) == wanted, state
        back(scene.decode, before[1], state)
        back(scene.prefill, before[0], state)
    assert [one.pid for one in scene.engines if one.runs] == pids


@pytest.mark.soak("handoff", minutes=2)
@pytest.mark.parametrize("number", [KILL, STOP])
def test_decode_that_waits_for_memory_goes_on_by_itself_when_prefill_ends_or_stops(
    scene: PushScene, number: signal.Signals
) -> None:
    scene.decode.end()
    scene.decode.start("--kv-blocks", "40")
    tokens_of(scene.ask_other("The link to the other one stays. ").decode)
    before = scene.decode.threads_and_descriptors()
    running = scene.threads.submit(scene.decode.complete, "x" * 300, 300)
    assert wait_for(lambda: scene.decode.metric("running"))
    asked = scene.ask(prompt_of("prealloc"))
    assert wait_for(lambda: [one["missing_ranks"] for one in scene.prefill.handoffs()] == [[]])
    assert scene.decode.handoffs()[0]["state"] == "bootstrapping"
    scene.prefill.signal(number)
    expected = scene.other.complete(prompt_of("prealloc"), 8)["choices"][0]["token_ids"]
    assert tokens_of(asked.decode) == expected
    assert outcome_of(asked.decode)[0] == "failed"
    assert len(tokens_of(running)) == 300
    back(scene.decode, before, "prealloc")


# What is between the two


@pytest.mark.soak("handoff", minutes=2)
def test_whatever_is_between_the_engines_costs_time_and_no_tokens(scene: PushScene) -> None:
    tokens_of(scene.ask_other("The link to the other one stays. ").decode)
    before = scene.decode.threads_and_descriptors()
    secret = scene.secret
    far = RegistryClient(scene.prefill.registry, secret)
    over = threading.Event()

    def stall(data: bytes, done: int) -> bytes:
        if done + len(data) > 40_000:
            over.wait(20.0)
        return data

    for what, change, causes in (
        ("nothing", lambda data, done: data, {None}),
        ("a byte is changed", flip(50_000), {"digest"}),
        ("it is cut within a range", lambda data, at: None if at > 40_000 else data,
         {"peer_closed"}),
        ("it stalls", stall, {"peer_silent"}),
    ):  # fmt: skip
        others = Bystanders(scene, scene.decode)
        [record] = far.ranks()
        host, port = record.address.rsplit(":", 1)
        relay = Relay(f"{host}:{port}", change)
        registry = HandoffRegistry("127.0.0.1", 0, secret)
        try:
            there = msgspec.structs.replace(record, address=relay.address, lease_s=60.0)
            RegistryClient(registry.url, secret).register(there)
            asked = scene.ask(prompt_of(what), registry.url)
            expected = scene.other.complete(prompt_of(what), 8)["choices"][0]["token_ids"]
            assert tokens_of(asked.decode) == expected, what
            assert outcome_of(asked.decode)[1] in causes, what
            asked.prefill.result(ANSWER_S)
            others.check(what)
        finally:
            if change is stall:
                over.set()
            relay.close()
            registry.close()
        back(scene.prefill, scene.prefill.threads_and_descriptors(), what)
        back(scene.decode, before, what)


@pytest.mark.soak("handoff", minutes=2)
def test_a_registry_that_is_away_stands_or_talks_nonsense_costs_time_and_no_tokens(
    scene: PushScene,
) -> None:
    before = scene.decode.threads_and_descriptors()

    def garbage(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(
                        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n" + b"\xff" * 9
                    )

    for what in ("away", "silent", "nonsense"):
        others = Bystanders(scene, scene.decode)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            thread = threading.Thread(target=garbage, args=(listener,))
            if what == "away":
                listener.close()
            elif what == "nonsense":
                thread.start()
            asked = scene.ask(prompt_of(what), url)
            expected = scene.other.complete(prompt_of(what), 8)["choices"][0]["token_ids"]
            assert tokens_of(asked.decode) == expected, what
            assert outcome_of(asked.decode) == ("failed", "unreachable"), what
            assert outcome_of(asked.prefill) == ("failed", "deadline"), what
            if what == "nonsense":
                listener.shutdown(socket.SHUT_RDWR)
                thread.join()
        others.check(what)
        back(scene.prefill, scene.prefill.threads_and_descriptors(), what)
    assert wait_for(lambda: not scene.decode.held())
    assert before[0] + 4 >= scene.decode.threads_and_descriptors()[0], "one link to the other"
