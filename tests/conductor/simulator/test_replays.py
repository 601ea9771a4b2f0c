"""Goal: a replay of a dispatcher's journal decides the same, whatever happens to engines."""

from conductor.costs.book import CostBook
from conductor.routing.admission import AdmissionMode, AdmissionRules, ServiceClass
from conductor.routing.choices import Effect, Reject
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
