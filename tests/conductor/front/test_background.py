"""Goal: a bug in the Conductor's own work ends a turn of it: not the service, not a request."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from conductor.costs.book import CostBook
from conductor.front import advising, guarding, kept_costs
from conductor.front.advising import Adviser
from conductor.front.cluster import ClusterNodes
from conductor.front.connections import Front
from conductor.front.guarding import Guard
from conductor.front.metrics import Metrics
from conductor.front.nodes import Nodes
from conductor.front.others import OthersReader
from conductor.front.upstream import Upstream
from conductor.routing.engines import EngineRegistry
from kvstore.process.faults import Faults
from kvstore.testing.stores import MemoryRecords, MemoryStore
from tests.conductor.fake_nodes import FakeNode, beside
from tests.conductor.fakes import FakeEngine, serving
from tests.local_index import LocalIndex
from tests.loops import eventually, in_loop

TURNS: dict[str, tuple[type, str]] = {
    "membership": (EngineRegistry, "next_probe_at"),
    "probe": (Upstream, "get"),
    "node": (Nodes, "_seen"),
    "cluster": (ClusterNodes, "_compare"),
    "index": (LocalIndex, "run"),
    "front": (Front, "run"),
    "costs": (CostBook, "dump"),
    "loop lag": (Metrics, "loop_lag"),
    "advice": (Adviser, "_seen"),
    "others": (OthersReader, "_due"),
    "metrics": (OthersReader, "_tell"),
}
"""Work → what raises in it."""


@pytest.mark.parametrize("work", TURNS)
@in_loop
async def test_work_that_fails_once_goes_on_and_so_does_the_service(
    work: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    owner, name = TURNS[work]
    unbroken, failed = getattr(owner, name), 0

    def once(*args: Any, **kwargs: Any) -> Any:
        nonlocal failed
        failed += 1
        if failed == 1:
            raise KeyError(work)
        return unbroken(*args, **kwargs)

    monkeypatch.setattr(kept_costs, "PERIOD_S", 0.01)
    monkeypatch.setattr(guarding, "AGAIN_S", 0.01)
    monkeypatch.setattr(advising, "REFRESHED_S", 0.01)
    monkeypatch.setattr(advising, "KEPT_S", 0.0)
    engine, node = FakeEngine("e", "mixed"), FakeNode("n", cluster="blue")
    store = MemoryStore(MemoryRecords())
    cluster = {"name": "blue", "membership": "etcd"}
    async with beside(node):
        if work in ("cluster", "index", "front"):
            monkeypatch.setattr(owner, name, once)
        async with serving(
            engine, store=store, cluster=cluster, etcd={"endpoints": ["h:1"]},
            costs={"file": str(tmp_path / "costs")}, health={"backoff_s_max": 0.1},
        ) as client:  # fmt: skip
            assert (await client.operate("/v1/nodes", {"url": node.url}))[0] == 201
            monkeypatch.setattr(owner, name, once)
            faults = client.conductor.faults.counts
            await eventually(lambda: faults["background"], "it has failed")
            await eventually(lambda: failed > 1, "it goes on")
            assert (await client.complete())[0] == 200
            node.told["boot"] = "another"
            nodes = client.conductor.membership.nodes
            await eventually(lambda: nodes.views[0].boot == "another", "nodes are read")
            assert faults["background"] == 1
            assert faults["internal"] == 0
            _, told = await client.get("/metrics")
            assert 'faults_total{cause="background"} 1' in told
        monkeypatch.undo()


@in_loop
async def test_a_failed_assertion_is_not_survived_and_nor_is_a_cancellation() -> None:
    guard = Guard(Faults(logging.getLogger(), ""))

    async def forever() -> None:
        await asyncio.Event().wait()

    async def fails(kind: type[BaseException]) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(forever())
            raise kind

    with pytest.raises(BaseExceptionGroup):
        await guard.keep("x", lambda: fails(AssertionError))
    with pytest.raises(AssertionError), guard.turn("x"):
        raise AssertionError
    kept = asyncio.create_task(guard.keep("x", forever))
    await asyncio.sleep(0)
    kept.cancel()
    with pytest.raises(asyncio.CancelledError):
        await kept


@in_loop
async def test_one_bug_again_and_again_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    faults = Faults(logging.getLogger(), "")
    guard = Guard(faults)
    for _ in range(50):
        with guard.turn("x"):
            raise KeyError("x")
    assert faults.counts["background"] == 50
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info, "it says where"
