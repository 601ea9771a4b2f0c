"""Goal: nodes bring what waiting requests need, and stop when it is of no use; then all is told."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
from aiohttp import web

from kvstore.events.publisher import EventPublisher
from kvstore.page import page_keys
from tests.conductor.fakes import OPERATE, Client, FakeEngine, FakeNode, serving, session_of
from tests.conductor.test_service import LOOPBACK, stored
from tests.index.publishers import as_node
from tests.loops import eventually, in_loop

PROMPT = list(range(64))
KEYS = page_keys(np.array(PROMPT, dtype=np.uint32), 4)
SPACE = "ab" * 32


class Job(NamedTuple):
    path: str
    body: dict[str, Any]


class WorkingNode(FakeNode):
    """A node that carries out jobs, or does not.

    Attributes:
        jobs: what it was asked, by number.
        ended: those that were cancelled.
        state: of every job.
        refuses: whether it refuses to begin any.
    """

    def __init__(self, name: str, publisher: EventPublisher) -> None:
        super().__init__(
            name, endpoint=publisher.bound_endpoint, cluster="blue",
            replay_endpoint=publisher.bound_replay_endpoint,
        )  # fmt: skip
        self.jobs: list[Job] = []
        self.ended: list[int] = []
        self.state = "running"
        self.result: dict[str, object] = {}
        self.refuses = False

        self.more = [
            web.post("/v1/{what:prefetch|replicate}", self._begin),
            web.get("/v1/jobs/{job}", self._show),
            web.delete("/v1/jobs/{job}", self._end),
        ]

    async def _begin(self, http: web.Request) -> web.Response:
        if self.refuses:
            return web.json_response({}, status=403)
        self.jobs.append(Job(http.path, await http.json()))
        return self._told(len(self.jobs) - 1, 202)

    async def _show(self, http: web.Request) -> web.Response:
        return self._told(int(http.match_info["job"]), 200)

    async def _end(self, http: web.Request) -> web.Response:
        self.ended.append(int(http.match_info["job"]))
        return self._told(self.ended[-1], 200)

    def _told(self, job: int, status: int) -> web.Response:
        row = {"job": job, "kind": "x", "state": self.state, "result": self.result}
        return web.json_response(row, status=status)


class Scene(NamedTuple):
    client: Client
    nodes: dict[str, WorkingNode]
    publishers: dict[str, EventPublisher]
    engines: dict[str, FakeEngine]

    async def knows(self, node: str, pages: int, medium: str) -> None:
        """Let a node have pages of the prompt, and wait until that is known."""
        before = self.client.entries
        self.publishers[node].publish([stored(KEYS[:pages], medium)])
        await eventually(lambda: self.client.entries > before)

    async def counts(self) -> dict[tuple[str, str], float]:
        """What became of jobs."""
        told = self.client.conductor._bringer.gauges()["brought"]
        return {labels: count for labels, count in told.items() if count}  # type: ignore[misc]


@asynccontextmanager
async def scene(**bring: object) -> AsyncIterator[Scene]:
    """Two mixed engines with a place each, each at a node of its own; both places are taken."""
    async with AsyncExitStack() as stack:
        publishers, nodes, engines = {}, {}, {}
        for name in ("n1", "n2"):
            publisher = EventPublisher(LOOPBACK, LOOPBACK, topic=f"kvstore@{name}@b1".encode())
            publishers[name] = as_node(stack.enter_context(publisher), "b1")
            nodes[name] = WorkingNode(name, publisher)
            engine = FakeEngine(f"e{name[1]}", "mixed", max_running=1, node=name)
            engines[engine.id] = engine
            nodes[name].sessions = [session_of(engine.id, shards=["cd" * 32])]
            await nodes[name].start()
            stack.push_async_callback(nodes[name].stop)
        sections = {
            "policy": {"name": "longest-prefix"},
            "bring": {"prefetches": True, "after_s": 0.0, **bring},
        }
        client = await stack.enter_async_context(serving(*engines.values(), **sections))
        for name, node in nodes.items():
            body = {"url": node.url, "operate_token": OPERATE}
            status, answer, _ = await client.operate("/v1/nodes", body)
            assert status == 201, answer
            await eventually(lambda: client.is_current(f"node/{name}"))  # noqa: B023
        yield Scene(client, nodes, publishers, engines)


async def blocked(made: Scene) -> list[asyncio.Task[Any]]:
    """Take both places."""
    for engine in made.engines.values():
        engine.gate.clear()
    tasks = [asyncio.create_task(made.client.complete([n] * 9)) for n in (1, 2)]
    await eventually(lambda: all(one.running for one in made.engines.values()))
    return tasks


@in_loop
async def test_pages_on_disk_are_loaded_while_their_request_waits_for_the_engine_there() -> None:
    async with scene() as made:
        await made.knows("n1", 8, "STORAGE")
        taken = await blocked(made)
        asked = asyncio.create_task(made.client.complete(PROMPT))
        node = made.nodes["n1"]
        await eventually(lambda: node.jobs)
        [job] = node.jobs
        assert (job.path, job.body["space"]) == ("/v1/prefetch", SPACE)
        assert job.body["keys"] == [bytes(one).hex() for one in KEYS[:8]]
        node.state = "done"
        made.engines["e1"].gate.set()
        status, _, headers = await asked
        assert status == 200
        await eventually(lambda: made.client.conductor._bringer._counts["load", "done"] == 1)
        assert node.ended == []
        decision = await made.client.decision(headers["X-Request-Id"])
        [told] = decision["brought"]
        assert (told["node"], told["source"], told["tokens"]) == ("n1", "n1", 32)
        made.engines["e2"].gate.set()
        await asyncio.gather(*taken)


@in_loop
async def test_a_job_for_a_request_that_goes_elsewhere_is_ended() -> None:
    async with scene() as made:
        await made.knows("n1", 8, "STORAGE")
        taken = await blocked(made)
        asked = asyncio.create_task(made.client.complete(PROMPT))
        node = made.nodes["n1"]
        await eventually(lambda: node.jobs)
        made.engines["e2"].gate.set()  # it is free first
        status, _, headers = await asked
        assert (status, len(made.engines["e2"].requests)) == (200, 2)
        await eventually(lambda: node.ended == [0])
        await eventually(lambda: made.client.conductor._bringer._counts["load", "cancelled"] == 1)
        [told] = (await made.client.decision(headers["X-Request-Id"]))["brought"]
        assert told["outcome"] in ("", "cancelled")
        gauges = made.client.conductor._bringer.gauges()
        assert gauges["bring_bytes"][()] == 0
        made.engines["e1"].gate.set()
        await asyncio.gather(*taken)


@in_loop
async def test_a_client_that_goes_ends_the_job_for_it() -> None:
    async with scene() as made:
        await made.knows("n1", 8, "STORAGE")
        taken = await blocked(made)
        asked = asyncio.create_task(made.client.complete(PROMPT))
        await eventually(lambda: made.nodes["n1"].jobs)
        asked.cancel()
        await eventually(lambda: made.nodes["n1"].ended == [0])
        for engine in made.engines.values():
            engine.gate.set()
        await asyncio.gather(*taken)


@pytest.mark.parametrize("trouble", ["refuses", "silent", "late", "incomplete"])
@in_loop
async def test_a_node_in_trouble_costs_a_request_nothing(trouble: str) -> None:
    async with scene(deadline_s=0.2) as made:
        await made.knows("n1", 8, "STORAGE")
        taken = await blocked(made)
        node = made.nodes["n1"]
        if trouble == "refuses":
            node.refuses = True
        elif trouble == "silent":
            await node.stop()
        elif trouble == "incomplete":
            node.state, node.result = "done", {"complete": False}
        asked = asyncio.create_task(made.client.complete(PROMPT))
        wanted = {"refuses": "refused", "silent": "refused"}.get(trouble, trouble)
        await eventually(lambda: made.client.conductor._bringer._counts["load", wanted] >= 1)
        if trouble == "late":
            assert node.ended[0] == 0
        made.engines["e1"].gate.set()
        assert (await asked)[0] == 200
        made.engines["e2"].gate.set()
        await asyncio.gather(*taken)


@in_loop
async def test_nothing_is_brought_beyond_the_budget_or_when_it_is_off() -> None:
    for bring in ({"bytes_max": 1}, {"prefetches": False}):
        async with scene(**bring) as made:
            await made.knows("n1", 8, "STORAGE")
            taken = await blocked(made)
            asked = asyncio.create_task(made.client.complete(PROMPT))
            await eventually(lambda: len(made.client.conductor.queue) == 1)
            bringer = made.client.conductor._bringer
            if bring != {"prefetches": False}:
                await eventually(lambda: bringer._looks)  # noqa: B023
            for engine in made.engines.values():
                engine.gate.set()
            await asyncio.gather(asked, *taken)
            assert not made.nodes["n1"].jobs


@in_loop
async def test_what_another_node_has_is_copied_to_that_of_the_likely_engine() -> None:
    async with scene() as made:
        client = made.client
        await eventually(
            lambda: all(engine.info.peers for engine in client.conductor.registry), "they are peers"
        )
        await made.knows("n2", 4, "CPU")
        taken = await blocked(made)
        made.engines["e2"].healthy = False
        other = client.conductor.registry.get("e2")
        assert other is not None
        await eventually(lambda: other.health.failures, "a probe has failed")
        asked = asyncio.create_task(client.complete(PROMPT))
        await eventually(lambda: made.nodes["n2"].jobs)
        job = made.nodes["n2"].jobs[0]
        assert job.path == "/v1/replicate"
        assert job.body["key"] == bytes(KEYS[3]).hex()
        assert (job.body["copies"], job.body["node"]) == (2, "n1")
        for engine in made.engines.values():
            engine.gate.set()
        await asyncio.gather(asked, *taken)


@in_loop
async def test_a_prefix_that_many_ask_for_is_copied_once() -> None:
    async with scene(prefetches=False, replicates=True, hot_rate=0.1) as made:
        await made.knows("n1", 16, "CPU")
        made.nodes["n1"].state = "done"
        for number in range(12):
            await made.client.complete([*PROMPT[:33], number, number])
        await eventually(lambda: made.client.conductor._bringer._counts["replicate", "done"] == 1)
        [job] = made.nodes["n1"].jobs
        assert (job.path, job.body["copies"]) == ("/v1/replicate", 2)
        assert job.body["key"] == bytes(KEYS[7]).hex(), "the pages that all of them have"
        assert not made.nodes["n2"].jobs
