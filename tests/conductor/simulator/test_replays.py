"""Goal: a replay of a dispatcher's journal decides the same, whatever happens to engines."""

from random import Random
from typing import Any

import pytest

from conductor.costs.book import CostBook
from conductor.routing import fleet
from conductor.routing.admission import AdmissionMode, AdmissionRules, ServiceClass
from conductor.routing.choices import Assign, Effect, Reject
from conductor.routing.desk import Desk
from conductor.routing.engines import EngineInfo, Role
from conductor.routing.journal import JournalHead, Line
from conductor.routing.requests import Request
from conductor.simulator.journal import replay


def engine(name: str, hardware: str = "8xh800") -> EngineInfo:
    return EngineInfo(
        id=name, role=Role.MIXED, url="http://x", model="m", page_tokens=16, domain="model:m",
        max_running=64, shape="llama3-70b", hardware=hardware,
    )  # fmt: skip


class Journaled:
    """A desk with a journal, used as the queue uses it."""

    def __init__(self, head: JournalHead) -> None:
        self.head = head
        self.lines: list[Line] = []
        dispatcher, registry = head.dispatcher(CostBook())
        self.desk = Desk(dispatcher, registry, lambda *_: {}, self.lines.append)
        self.number = 0

    @property
    def looked(self) -> Desk:
        self.desk.look()
        return self.desk

    def arrive(self, now: float, tokens: int = 3_000) -> list[Effect]:
        self.number += 1
        asked = Request(number=self.number, model="m", arrived=now, tokens=tokens)
        self.looked.arrive(asked)
        return self.looked.step(now)

    def same_again(self) -> bool:
        return not replay(self.head, self.lines)


def test_who_is_let_through_to_measure_follows_from_inputs_and_time() -> None:
    rules = AdmissionRules(AdmissionMode.PREDICTION, (ServiceClass(ttft_s=0.01),))
    case = Journaled(JournalHead("cache-global", [engine("a")], 1024, 30.0, 3, rules))
    admitted = 0
    for at in range(300):
        now = at * 0.7
        [effect] = case.arrive(now)
        if isinstance(effect, Reject):
            continue
        admitted += 1
        case.looked.began(case.number, now + 0.5)
        case.looked.ended(case.number, 10, now + 0.6, None)
        case.looked.left(case.number, now + 0.6)
        case.looked.step(now + 0.6)
    assert 15 <= admitted <= 25, "one each ten seconds or so"
    assert case.same_again()


@pytest.mark.parametrize("policy", ["round-robin", "earliest-first-token", "least-loaded"])
@pytest.mark.parametrize("gone", ["b", "abc"])
def test_an_engine_that_is_removed_and_comes_back_at_once_is_forgotten_in_a_replay(
    gone: str, policy: str
) -> None:
    infos = [engine(name) for name in "abc"]
    case = Journaled(JournalHead(policy, infos, 1024, 30.0, 3))
    for at in range(5):
        case.arrive(at / 100)
    registry = case.desk.registry
    for name in gone:  # as the admin API does
        case.looked.forget(name)
        registry.remove(name)
    for info in infos:
        registry.register(info, 0.05)
    for at in range(6, 12):
        case.arrive(at / 100)
    assert case.same_again()


@pytest.mark.parametrize("seed", range(3))
def test_lending_looks_at_the_same_engines_in_a_replay(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What engines are thought to have computed by now is part of it."""
    random = Random(seed)
    seen: list[object] = []
    fleet_of = fleet.fleet_of

    def spied(*args: Any) -> Any:
        found = fleet_of(*args)
        seen.append([(one.id, one.prompts_s, one.answers) for one in found[0]])
        return found

    monkeypatch.setattr(fleet, "fleet_of", spied)
    infos = [engine(f"m{at}", random.choice(["8xh800", "8xa800", "8xh20"])) for at in range(4)]
    rules = AdmissionRules(AdmissionMode.NONE, (ServiceClass("d", 5.0, 0.06),))
    head = JournalHead("earliest-first-token", infos, 1024, 30.0, 3, rules, lends=True)
    case = Journaled(head)
    now, served = 0.0, list[tuple[float, int]]()
    for _ in range(150):
        now += random.expovariate(6.0)
        for at, number in [one for one in served if one[0] <= now]:
            served.remove((at, number))
            case.looked.left(number, at)
            case.looked.step(at)
        for effect in case.arrive(now, random.choice([500, 3_000, 20_000])):
            if isinstance(effect, Assign) and effect.prefill == effect.decode:
                case.looked.untold(effect.request, effect.prefill)
            served.append((now + random.uniform(0.5, 8.0), effect.request))
        served.sort()
    live = [*seen]
    seen.clear()
    assert case.same_again()
    assert live == seen
