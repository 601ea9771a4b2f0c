"""Goal: what was known and decided before the index became a process of its own is so still."""

import json

import pytest

from conductor.routing.choices import Assign
from conductor.routing.engines import EngineInfo, EngineRegistry, Role
from conductor.routing.naming import own_domain
from conductor.routing.places import engine_worker, node_worker
from conductor.routing.policy import POLICIES
from conductor.routing.prefixes import PrefixView
from conductor.routing.scheduler import Scheduler
from kvstore.index.control import IndexSettings, Source, SourceBounds
from tests.conductor.routing.columns import engine, request, view_of, waiting
from tests.conductor.routing.recorded import (
    ENGINES,
    MODEL,
    NODES,
    PAGE_TOKENS,
    RECORDED,
    SPACE,
    steps,
)
from tests.local_index import LocalIndex

MAX_RUNNING = 4


def registry() -> EngineRegistry:
    found = EngineRegistry()
    for one in ENGINES:
        info = EngineInfo(
            id=one.id, role=Role(one.role), url="http://127.0.0.1:1", model=MODEL,
            page_tokens=PAGE_TOKENS, domain=SPACE, node=one.node,
        )  # fmt: skip
        found.register(info, 0.0)
    return found


def source(worker: str, domain: str = "") -> Source:
    return Source(worker=worker, domain=domain, endpoint="ipc:///nowhere")


@pytest.fixture
def index() -> LocalIndex:
    bounds = SourceBounds(replay_s=1.0, verify_s=1.0, foreign_blocks=10_000)
    return LocalIndex(IndexSettings(100_000, bounds))


def test_prefixes_and_decisions_are_those_that_were_recorded(index: LocalIndex):
    engines = registry()
    for one in engines:
        index.follow(source(engine_worker(one.info.id), own_domain(one.info)))
    for name in NODES:
        index.follow(source(node_worker(name)))
    feeds = {one.source.worker: one.feed for one in index._service._followers}
    for feed in feeds.values():
        feed.live(counts=True)
    view = PrefixView(index, engines, needed=True)
    recorded = json.loads(RECORDED.read_text())
    for number, (step, then) in enumerate(zip(steps(), recorded, strict=True)):
        for worker, payload in step.payloads:
            for _ in feeds[worker].apply(payload):
                pass
            feeds[worker].flush()
        view.remember(number, step.tokens, "", MODEL)
        found = view.find(number, MODEL)
        now = {name: list(prefix[:3]) for name, prefix in found.items()}
        assert now == then["prefixes"], number
        rows = [
            engine(one.id, one.role, in_flight=step.in_flight[one.id], max_running=MAX_RUNNING)
            for one in ENGINES
        ]
        asked = waiting([request(number, matches=found)])
        [decision] = Scheduler(POLICIES["longest-prefix"]).schedule(view_of(rows), asked, 0.0)
        assert isinstance(decision, Assign)
        decided = (decision.prefill, decision.decode, decision.usable_tokens)
        assert decided == (then["prefill"], then["decode"], then["usable_tokens"]), number
        view.forget(number)
