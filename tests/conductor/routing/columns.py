"""Columns for the scheduler, from rows that tests are easier to read with."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from conductor.costs.book import CostBook
from conductor.routing.choices import Choice, Hold
from conductor.routing.columns import NO_KEYS, Matches, View, Waiting
from conductor.routing.engines import EngineInfo, Health, Role
from conductor.routing.load import EngineLoads
from conductor.routing.pending import WaitingRow, WaitingRows
from conductor.routing.policy import POLICIES
from conductor.routing.scheduler import Scheduler
from kvstore.index.layout import Words

NOW = 100.0
USUAL_S = 1.5
"""Seconds to the first token of requests, lately."""
AT_ONCE = ("at-once",)
"""Protocols by which both engines of a pair are asked at once."""


@dataclass(frozen=True)
class EngineRow:
    """A row of :class:`View`."""

    id: str
    role: Role
    model: str = "m"
    adapters: Collection[str] = ()
    protocol: str = "at-once"
    offer: str = ""
    health: Health = Health.ALIVE
    in_flight: int = 0
    promised: int = 0
    max_running: int = 4
    last_assigned: int = 0
    backlog_s: float = 0.0
    leaving_s: float = 0.0
    late: tuple[float, float, float] = (0.0, 0.0, 0.0)
    others: int = 0
    others_s: float = 0.0


@dataclass(frozen=True)
class RequestRow:
    """A row of :class:`Waiting`."""

    number: int = 1
    model: str = "m"
    deadline: float = NOW + 1
    excluded: frozenset[str] = frozenset()
    tokens: int | None = None
    priority: int = 0
    tenant: str = ""
    session: str = ""
    matches: Matches | None = None
    arrived: float = 0.0
    keys: Words = field(default_factory=lambda: NO_KEYS)
    least_s: float = 0.0
    bound: str = ""
    output: float = 100.0


def engine(name: str, role: str = "mixed", **fields: object) -> EngineRow:
    return EngineRow(name, Role(role), **fields)  # type: ignore[arg-type]


def request(number: int = 1, **fields: object) -> RequestRow:
    return RequestRow(number, **fields)  # type: ignore[arg-type]


def view_of(rows: Sequence[EngineRow], *, assigned: int = 0, retry_after_s: int = 1) -> View:
    numbers = {
        name: np.array([getattr(row, name) for row in rows], dtype=np.int64)
        for name in ("in_flight", "promised", "max_running", "last_assigned", "others")
    }
    infos = [
        EngineInfo(
            id=row.id, role=row.role, url="http://x", model=row.model, page_tokens=4, domain="d",
            shape="llama3-70b", hardware="8xh800",
        )
        for row in rows
    ]  # fmt: skip
    costs = EngineLoads(CostBook()).columns(infos, NOW)
    backlog = np.array([row.backlog_s for row in rows], dtype=np.float64)
    leaving = np.array([row.leaving_s for row in rows], dtype=np.float64)
    line, square, most = np.array([row.late for row in rows], dtype=np.float64).reshape(-1, 3).T
    costs = replace(
        costs, backlog_s=backlog, leaving_s=leaving, usual_s=USUAL_S,
        inputs=costs.inputs._replace(
            late_per_s=line, late_per_s2=square, late_most=most,
            others_s=np.array([row.others_s for row in rows], dtype=np.float64),
        ),
    )  # fmt: skip
    return View(
        ids=[row.id for row in rows],
        models=[row.model for row in rows],
        adapters=[row.adapters for row in rows],
        protocols=[row.protocol for row in rows],
        preferred=[row.offer for row in rows],
        roles=[row.role for row in rows],
        health=[row.health for row in rows],
        assigned=assigned,
        retry_after_s=retry_after_s,
        costs=costs,
        **numbers,
    )


def waiting(rows: Sequence[RequestRow], matches: Matches | None = None) -> Waiting:
    """``matches``: of those that have none of their own."""
    return WaitingRows(
        WaitingRow(
            number=row.number,
            model=row.model,
            arrived=row.arrived,
            deadline=row.deadline,
            half=(row.arrived + row.deadline) / 2,
            excluded=row.excluded,
            tokens=row.tokens,
            keys=row.keys,
            priority=row.priority,
            tenant=row.tenant,
            session=row.session,
            matches=row.matches or matches or {},
            least_s=row.least_s,
            bound=row.bound,
            output=row.output,
        )
        for row in rows
    ).columns


def schedule(
    policy: str,
    engines: Sequence[EngineRow],
    requests: Sequence[RequestRow],
    matches: Matches | None = None,
    *,
    retry_after_s: int = 1,
) -> list[Choice]:
    """What a policy decides at :data:`NOW`."""
    view = view_of(engines, assigned=9, retry_after_s=retry_after_s)
    return decided(Scheduler(POLICIES[policy], AT_ONCE), view, waiting(requests, matches))


def decided(scheduler: Scheduler, view: View, asked: Waiting, now: float = NOW) -> list[Choice]:
    """A decision on each request, in the policy's order: who goes on waiting is held."""
    decisions = {one.request: one for one in scheduler.schedule(view, asked, now)}
    order = [asked.numbers[row] for row in scheduler.policy.order(asked, now)]
    bound = dict(zip(asked.numbers, asked.bound, strict=True))
    assert list(decisions) == [number for number in order if number in decisions]
    return [decisions.get(number, Hold(number, bound[number])) for number in order]
