"""Goal: nodes bring what waiting requests need, and stop when it is of no use; then all is told."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from aiohttp import web

from conductor.front import bringing
from conductor.routing.bringing import Wish
from conductor.routing.engines import LoraAdapter
from kvstore.cluster.records import NodeRecord, write_record
from kvstore.events.publisher import EventPublisher
from kvstore.protocol.page import page_keys
from kvstore.testing.stores import MemoryRecords, MemoryStore
from tests.conductor.fake_nodes import FakeNode, session_of
from tests.conductor.fakes import OPERATE, Client, FakeEngine, serving
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
        tokens: with which.
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
        self.tokens: list[str] = []
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
        self.tokens.append(http.headers.get("Authorization", ""))
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
async def scene(
    cluster: Mapping[str, object] | None = None,
    token: str | None = OPERATE,
    protocol: str = "reference",
    roles: Sequence[str] = ("mixed", "mixed"),
    **bring: object,
) -> AsyncIterator[Scene]:
    """Two engines with a place each, each at a node of its own.

    ``cluster``: the nodes are in the store of this one, instead of being registered with ``token``.
    """
    records = MemoryRecords(lease_s=60.0)
    async with AsyncExitStack() as stack:
        publishers, nodes, engines = {}, {}, {}
        for name, role in zip(("n1", "n2"), roles, strict=True):
            publisher = EventPublisher(LOOPBACK, LOOPBACK, topic=f"kvstore@{name}@b1".encode())
            publishers[name] = as_node(stack.enter_context(publisher), "b1")
            nodes[name] = WorkingNode(name, publisher)
            engine = FakeEngine(
                f"e{name[1]}", role, max_running=1, node=name, protocol=protocol
            )  # fmt: skip
            engines[engine.id] = engine
            nodes[name].sessions = [session_of(engine.id, shards=["cd" * 32])]
            await nodes[name].start()
            stack.push_async_callback(nodes[name].stop)
        sections: dict[str, Any] = {
            "policy": {"name": "longest-prefix"},
            "bring": {"prefetches": True, "after_s": 0.0, **bring},
        }
        if cluster is not None:
            sections |= {"cluster": cluster, "etcd": {"endpoints": ["127.0.0.1:1"]}}
        made = serving(*engines.values(), store=MemoryStore(records), **sections)
        client = await stack.enter_async_context(made)
        for name, node in nodes.items():
            if cluster is not None:
                boot = name.encode() * 8
                record = NodeRecord(name=name, boot=boot, endpoint="127.0.0.1:1", admin=node.url)
                records.put(name, write_record(record))
            else:
                body = {"url": node.url, "operate_token": token}
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


class Waits(NamedTuple):
    """A request that waits, with pages on the disk of n1, a node of the scene."""

    made: Scene
    asked: asyncio.Task[Any]
    node: WorkingNode

    @property
    def bringer(self) -> Any:
        return self.made.client.conductor._bringer

    async def ended(self, outcome: str, kind: str = "load") -> None:
        """Wait until a job has ended so."""
        await eventually(lambda: self.bringer._counts[kind, outcome] >= 1, outcome)


@asynccontextmanager
async def waiting(
    prepare: Callable[[Scene], Awaitable[object]] | None = None, **given: Any
) -> AsyncIterator[Waits]:
    """A request waits, because both places are taken; at the end they are free."""
    async with scene(**given) as made:
        await made.knows("n1", 8, "STORAGE")
        taken = await blocked(made)
        if prepare is not None:
            await prepare(made)
        asked = asyncio.create_task(made.client.complete(PROMPT))
        await eventually(lambda: made.client.conductor.queue.dispatcher.unassigned)
        yield Waits(made, asked, made.nodes["n1"])
        for engine in made.engines.values():
            engine.gate.set()
        await asyncio.gather(asked, *taken, return_exceptions=True)


@in_loop
async def test_pages_on_disk_are_loaded_while_their_request_waits_for_the_engine_there() -> None:
    async with waiting() as one:
        node = one.node
        await eventually(lambda: node.jobs)
        [job] = node.jobs
        assert (job.path, job.body["space"]) == ("/v1/prefetch", SPACE)
        assert job.body["keys"] == [bytes(key).hex() for key in KEYS[:8]]
        node.state = "done"
        one.made.engines["e1"].gate.set()
        status, _, headers = await one.asked
        assert status == 200
        await one.ended("done")
        assert node.ended == []
        decision = await one.made.client.decision(headers["X-Request-Id"])
        [told] = decision["brought"]
        assert (told["node"], told["source"], told["tokens"]) == ("n1", "n1", 32)


@in_loop
async def test_a_job_for_a_request_that_goes_elsewhere_is_ended() -> None:
    async with waiting() as one:
        await eventually(lambda: one.node.jobs)
        one.made.engines["e2"].gate.set()  # it is free first
        status, _, headers = await one.asked
        assert (status, len(one.made.engines["e2"].requests)) == (200, 2)
        await eventually(lambda: one.node.ended == [0])
        await one.ended("cancelled")
        [told] = (await one.made.client.decision(headers["X-Request-Id"]))["brought"]
        assert told["outcome"] in ("", "cancelled")
        assert one.bringer.gauges()["bring_bytes"][()] == 0


@in_loop
async def test_a_client_that_goes_ends_the_job_for_it() -> None:
    async with waiting() as one:
        await eventually(lambda: one.node.jobs)
        one.asked.cancel()
        await eventually(lambda: one.node.ended == [0])


@pytest.mark.parametrize("trouble", ["refuses", "silent", "late", "incomplete"])
@in_loop
async def test_a_node_in_trouble_costs_a_request_nothing(trouble: str) -> None:
    async def prepare(made: Scene) -> None:
        node = made.nodes["n1"]
        if trouble == "refuses":
            node.refuses = True
        elif trouble == "silent":
            await node.stop()
        elif trouble == "incomplete":
            node.state, node.result = "done", {"complete": False}

    async with waiting(prepare, deadline_s=0.2 if trouble == "late" else 10.0) as one:
        await one.ended({"refuses": "refused", "silent": "refused"}.get(trouble, trouble))
        if trouble == "late":
            assert one.node.ended[0] == 0
        one.made.engines["e1"].gate.set()
        assert (await one.asked)[0] == 200


@in_loop
async def test_the_nodes_of_a_membership_are_asked_with_its_operate_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("operates-all-nodes\n")
    cluster = {
        "name": "blue", "membership": "etcd", "operate_token_file": str(tmp_path / "token"),
    }  # fmt: skip
    async with waiting(cluster=cluster) as one:
        await eventually(lambda: one.node.jobs)
        assert one.node.tokens == ["Bearer operates-all-nodes"]


@pytest.mark.parametrize("cluster", [None, {"name": "blue", "membership": "etcd"}])
@in_loop
async def test_a_node_whose_operate_token_is_not_known_is_not_asked(cluster: Any) -> None:
    async with waiting(cluster=cluster, token=None) as one:
        bringer = one.bringer
        await eventually(lambda: any(look.wish for look in bringer._looks.values()))
        await eventually(lambda: bringer._planner._numbers, "it was to be begun")
        assert bringer.gauges()["bring_bytes"][()] == 0
    assert not one.node.jobs
    assert not one.node.tokens


@pytest.mark.parametrize("bug", ["look", "step", "begin", "carry", "went", "replicate"])
@in_loop
async def test_a_bug_in_bringing_costs_neither_a_request_nor_the_service(
    bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> Any:
        raise KeyError(bug)

    async def prepare(made: Scene) -> None:
        bringer = made.client.conductor._bringer
        what: dict[str, tuple[object, str]] = {
            "look": (bringer._prefixes, "media"),
            "step": (bringer._planner, "step"),
            "begin": (bringer._prefixes, "pages"),
            "carry": (bringing, "carry_out"),
            "went": (bringer._planner, "went"),
            "replicate": (bringer._hot, "came"),
        }
        owner, name = what[bug]
        owner = type(owner) if bug in ("step", "went") else owner
        monkeypatch.setattr(owner, name, broken)

    async with waiting(prepare, replicates=True) as one:
        faults = one.made.client.conductor.faults.counts
        if bug in ("went", "replicate"):
            one.node.state = "done"
        else:
            await eventually(lambda: faults["background"])
        one.made.engines["e1"].gate.set()
        assert (await one.asked)[0] == 200
        await eventually(lambda: faults["background"])
        assert faults["internal"] == 0
        monkeypatch.undo()
        await eventually(lambda: one.bringer.gauges()["bring_bytes"][()] == 0, "nothing is left")
        assert (await one.made.client.get("/readyz"))[0] == 200
        if bug == "carry":
            assert one.bringer._counts["load", "failed"] >= 1


@pytest.mark.parametrize("page_tokens", [1, 64])
@in_loop
async def test_nothing_is_asked_for_pages_that_the_prompt_has_not(page_tokens: int) -> None:
    """An engine may register with other pages between a look and what follows from it."""
    async with waiting(bytes_max=1) as one:
        await eventually(lambda: one.bringer._looks)
        bringer, [number] = one.bringer, list(one.bringer._looks)
        told = bringer._prefixes.pages
        bringer._prefixes.pages = lambda *asked: told(*asked)[: 32 // 4]
        engine = bringer._registry.get("e1")
        engine.info = msgspec.structs.replace(engine.info, page_tokens=page_tokens)
        wish = Wish(number, "n1", "n1", 32, 1)
        [start] = bringer._planner.step([wish])
        bringer._start(start)
        assert not bringer._cancels
        assert bringer.gauges()["bring_bytes"][()] == 0
    assert not one.node.jobs
    assert one.made.client.conductor.faults.counts["background"] == 0


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
        assert not made.client.conductor._bringer._replications


@in_loop
async def test_a_prefix_of_an_adapter_is_not_looked_for_among_those_of_its_model() -> None:
    async with scene(prefetches=False, replicates=True, hot_rate=0.1) as made:
        await made.knows("n1", 16, "CPU")
        made.nodes["n1"].state = "done"
        members = made.client.conductor.membership
        for one in members._registrations.values():
            one.adapters = {"sql": LoraAdapter("/sql", "ab")}
        members._rejoin()
        for model in ("sql", "m"):
            for number in range(12):
                status, _, _ = await made.client.complete([*PROMPT[:33], number], model=model)
                assert status == 200
        await eventually(lambda: made.client.conductor._bringer._counts["replicate", "done"])
        [job] = made.nodes["n1"].jobs
        assert job.body["key"] == bytes(KEYS[7]).hex()
