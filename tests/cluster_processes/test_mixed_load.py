"""Goal: two nodes serve mixed load for long, one restarted each minute, and nothing grows."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.cluster import has_met
from tests.cluster_processes.conftest import CLEAN_WAIT_S, ClusterNode, ClusterScene
from tests.cluster_processes.mixed_load import Held, MixedLoad, grows, growth, held_by
from tests.cluster_processes.store_scenes import start_server
from tests.conftest import wait_for

pytestmark = [pytest.mark.cluster]
CLIENTS = 2
MEET_WAIT_S = 60.0
ROUND_S, SHORT_ROUND_S = 60.0, 4.0
WARM_ROUNDS = 1
CALL_S_MAX = 10.0
"""Of a client at the node that is not restarted; a wait for other nodes is 2 s at most, and the
machine may be busy."""


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Prints a line at once: a long run shows how far it is."""

    def printed(line: str) -> None:
        with capsys.disabled():
            print(line, flush=True)  # noqa: T201

    return printed


@pytest.fixture
def nodes(scene: ClusterScene, tmp_path: Path) -> Iterator[tuple[ClusterNode, ClusterNode]]:
    """Two nodes that find each other in etcd and announce their pages in Redis."""
    with ExitStack() as undo:
        settings: dict[str, object] = {"debug__check_every_step": "false"}
        settings["events__replay_max"] = 500  # what is kept for followers is full after a round
        for kind, used in (("etcd", "membership"), ("redis", "directory")):
            server = undo.enter_context(start_server(kind, tmp_path / kind))
            settings |= {f"cluster__{used}": kind, f"{kind}__endpoints": server.endpoint}
        a, b = scene.add("a", "b")
        for node in (a, b):
            node.start([], **settings)
        meet(a, b)
        yield a, b
        scene.end()


def meet(*nodes: ClusterNode) -> None:
    """Wait until nodes have found each other and are announced."""
    for node in nodes:
        others = [one.name for one in nodes if one is not node]
        assert wait_for(lambda: has_met(node.stats(), others), MEET_WAIT_S), node.process.report()  # noqa: B023


def restart(node: ClusterNode, number: signal.Signals) -> None:
    """End a node in its work, and start it again."""
    node.process.send_signal(number)
    status = node.process.wait()
    assert status == (0 if number is signal.SIGTERM else -number), node.process.report()
    assert "Traceback" not in node.process.stderr, node.process.report()
    node.restart()


def under_load(loads: list[MixedLoad], seconds: float) -> None:
    """Let clients work for so long, or until one has found a fault."""
    wait_for(lambda: any(load.fault for load in loads), seconds)
    for load in loads:
        if load.fault is not None:
            raise load.fault


def one_round(
    nodes: tuple[ClusterNode, ClusterNode], loads: list[MixedLoad], seconds: float,
    number: signal.Signals,
) -> dict[str, Held]:  # fmt: skip
    """Load, in the middle of which the second node is restarted; what is held when it is quiet."""
    began = time.monotonic()
    for load in loads:
        load.go_on()
    under_load(loads, seconds / 2)
    restart(nodes[1], number)
    meet(*nodes)
    under_load(loads, max(seconds / 4, seconds - (time.monotonic() - began)))
    for load in loads:
        load.pause()
    under_load(loads, 0.0)
    samples = {}
    for node in nodes:
        assert wait_for(lambda: not node.held(), CLEAN_WAIT_S), node.held()  # noqa: B023
        samples[node.name] = held_by(node.process.pid)
        samples[f"index of {node.name}"] = held_by(node.index_pid)
    return samples


@pytest.mark.parametrize(
    "rounds_s", [pytest.param(0.0, marks=pytest.mark.timeout(180), id="short"),
                 pytest.param(1.0, marks=pytest.mark.soak("cluster", minutes=30), id="soak")],
)  # fmt: skip
def test_nodes_under_mixed_load_of_which_one_is_restarted_keep_to_what_they_have(
    nodes: tuple[ClusterNode, ClusterNode], rounds_s: float, soak_s: float,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    seconds = ROUND_S if rounds_s else SHORT_ROUND_S
    rounds = max(2, round(soak_s / ROUND_S))
    loads = [MixedLoad(node.address, seed) for seed, node in enumerate(CLIENTS * nodes)]
    samples: dict[str, list[Held]] = {}
    try:
        for done in range(rounds):
            number = (signal.SIGKILL, signal.SIGTERM)[done % 2]
            for name, held in one_round(nodes, loads, seconds, number).items():
                samples.setdefault(name, []).append(held)
            now = "; ".join(f"{name} {held[-1]}" for name, held in samples.items())
            say(f"\nround {done + 1}/{rounds}, {number.name}: {now}")
    finally:
        for load in loads:
            load.end()
    counts = [dict(sorted(load.counts.items())) for load in loads]
    fetched = [node.stats()["counts"].get("peer_fetched_pages", 0) for node in nodes]
    say(f"clients: {counts}; slowest {[round(load.slowest_s, 2) for load in loads]} s;"
        f" fetched from each other {fetched}")  # fmt: skip
    assert all(load.counts["pages_read"] for load in loads)
    assert fetched[0], "those of a restarted node begin at 0"
    assert max(load.slowest_s for load in loads[::2]) < CALL_S_MAX, "clients of the node that stays"
    if soak_s:
        judged = {name: held[WARM_ROUNDS:] for name, held in samples.items()}
        say("growth: " + "; ".join(f"{name} {growth(held)}" for name, held in judged.items()))
        assert not [name for name, held in judged.items() if grows(held)]


def test_growth_of_each_kind_is_found_and_a_single_peak_is_none() -> None:
    steady = [Held(50_000_000 + 100_000 * (at % 3), 40, 12) for at in range(30)]
    peak = [*steady[:14], Held(90_000_000, 80, 20), *steady[15:]]
    assert not grows(steady)
    assert not grows(peak)
    for step in (Held(1_000_000, 0, 0), Held(0, 1, 0), Held(0, 0, 1)):
        leaking = [
            Held(*(one + at * more for one, more in zip(held, step, strict=True)))
            for at, held in enumerate(steady)
        ]
        assert grows(leaking), step
