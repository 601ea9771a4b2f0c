"""Goal: two models share one full node for long, and nothing of the node grows."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.protocol.page import CanonicalLayout, ShardSpec, SpaceIdentity
from tests.client.conftest import READY, Daemon, arguments
from tests.cluster_processes.mixed_load import Held, MixedLoad, Model, grows, growth, held_by
from tests.conftest import Spawn, wait_for
from tests.faults import content

CLIENTS = 2
ROUND_S, SHORT_ROUND_S = 60.0, 3.0
WARM_PART = 1 / 3
REPLAY_MAX, GHOSTS_MAX = 256, 1_000
"""Batches of events and records of dropped pages that the node keeps: so few that it has them all
before it is judged. The defaults take 25 MB, and 16,000 puts to fill, which a busy machine does not
make in ten minutes."""
QUIET_WAIT_S = 10.0
CALL_S_MAX = 10.0
"""A wait for pages is 2 s at most, and the machine may be busy."""


def _model(name: str, layers: int, heads: int, *, chains: int, pages_max: int) -> Model:
    """Pages of 64 KiB for each head of each layer, more than fit into memory and on the disk."""
    identity = SpaceIdentity(model=name, kv_dtype="float32", page_tokens=content.PAGE_TOKENS)
    shard = ShardSpec(layout=CanonicalLayout(head_dim=128), layers=(0, layers), heads=(0, heads))
    return Model(identity, shard, (layers * heads) << 16, chains, pages_max)


MODELS = (
    _model("small", 1, 1, chains=256, pages_max=32),  # 512 MiB
    _model("large", 8, 16, chains=16, pages_max=4),  # 512 MiB
)


@pytest.fixture
def node(spawn: Spawn, tmp_path: Path) -> Daemon:
    """A node with 128 MiB of memory and 256 MiB on a disk."""
    disk = {
        "ssd__directories": tmp_path / "ssd",
        "ssd__capacity_bytes": "256MiB",
        "ssd__segment_bytes": "32MiB",
    }
    past = {"events__replay_max": REPLAY_MAX, "admin__ghosts_max": GHOSTS_MAX}
    program = arguments(tmp_path / "kv.sock", host__capacity_bytes="128MiB", **disk, **past)
    return Daemon(spawn(program, ready=READY))


def one_round(node: Daemon, loads: list[MixedLoad], seconds: float) -> Held:
    """Load for so long; what the node holds when it is quiet."""
    for load in loads:
        load.go_on()
    wait_for(lambda: any(load.fault for load in loads), seconds)
    for load in loads:
        load.pause()
        if load.fault is not None:
            raise load.fault
    assert wait_for(lambda: not _in_use(node), QUIET_WAIT_S), _in_use(node)
    return held_by(node.process.pid)


def _fills(node: Daemon) -> dict[str, int]:
    """How much of what the node keeps of the past is missing until it is full; empty if nothing."""
    stats = node.ask("/v1/stats")
    dropped = sum(count for name, count in stats["counts"].items() if name.startswith("removed_"))
    missing = {
        "batches": REPLAY_MAX - stats["events"]["sequence_next"],
        "dropped pages": 2 * GHOSTS_MAX - dropped,  # their parts do not fill evenly
    }
    return {name: count for name, count in missing.items() if count > 0}


def _in_use(node: Daemon) -> dict[str, int]:
    """What the node holds for its clients; empty when that is nothing."""
    stats = node.ask("/v1/stats")
    held = {name: stats["host"][f"{name}_bytes"] for name in ("writing", "pinned", "limbo")}
    held |= {name: stats[name] for name in ("leases", "puts", "waiting_requests")}
    return {name: value for name, value in held.items() if value}


@pytest.mark.parametrize(
    "rounds_s", [pytest.param(SHORT_ROUND_S, marks=pytest.mark.timeout(120), id="short"),
                 pytest.param(ROUND_S, marks=pytest.mark.soak("models", minutes=30), id="soak")],
)  # fmt: skip
def test_two_models_on_a_full_node_keep_to_what_they_have(
    node: Daemon, rounds_s: float, soak_s: float, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    rounds = max(2, round(soak_s / rounds_s))
    warm = max(1, round(WARM_PART * rounds))
    loads = [MixedLoad(node.address, seed, model) for seed, model in enumerate(CLIENTS * MODELS)]
    samples: list[Held] = []
    say = _sayer(capsys)
    try:
        for done in range(rounds):
            samples.append(one_round(node, loads, rounds_s))
            say(f"\nround {done + 1}/{rounds}: {samples[-1]}")
            if soak_s and done + 1 == warm:
                assert not _fills(node), "what is bounded by a number would be taken for a leak"
    finally:
        for load in loads:
            load.end()
    say(f"clients: {[dict(sorted(load.counts.items())) for load in loads]};"
        f" slowest {[round(load.slowest_s, 2) for load in loads]} s")  # fmt: skip
    assert all(load.counts["pages_read"] for load in loads)
    counts = node.ask("/v1/stats")["counts"]
    assert all(counts[name] for name in ("moved_extents", "evicted_to_disk", "reclaimed_pages"))
    if soak_s:
        judged = samples[warm:]
        say(f"growth: {growth(judged)}")
        assert not grows(judged)
    assert max(load.slowest_s for load in loads) < CALL_S_MAX


def _sayer(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Prints a line at once: a long run shows how far it is."""

    def say(line: str) -> None:
        with capsys.disabled():
            print(line, flush=True)  # noqa: T201

    return say
