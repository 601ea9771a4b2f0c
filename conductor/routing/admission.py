"""Admission: which requests are refused at once because they could not be served in time. Pure.

A request belongs to a **class** with objectives: seconds to its first token (TTFT) and between two
tokens (TBT). It is judged once, when it arrives:

``load``
    It is refused if the engines are overloaded now: the prompts before it, or those whose KV waits
    for a place to decode, need more seconds than its TTFT, or decode steps take longer than its
    TBT.
``prediction``
    It is refused if its own TTFT is predicted to be missed: behind the requests that are considered
    before it, with its own prompt and handoff, and the wait for a place to decode. The requests
    that decode at the predicted end of its prompt count, not those that decode now: requests that
    finish by then are excluded; those still in prefill are included. A request that has waited so
    long that its prompt can no longer be computed in time is refused, too.

Refusing by present load admits too many requests while decode engines are idle and prompts are
being computed, and too few when these decode: load oscillates. Mooncake's report (arXiv 2407.00079,
section 6) has this observation, and the idea of the prediction.

In both modes the seconds come from measurements of requests that were served. A slow time, or a
wrong measurement, must not refuse everybody for ever, so that nothing is measured again: a model
that has had no request for :data:`PROBE_S`, and has none now, gets the next one, a **probe**,
whatever is expected of it.
"""

import enum
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Final

import msgspec

from conductor.routing.choices import Assign, Judgement, Reject
from conductor.routing.columns import View, Waiting
from conductor.routing.demand import Crowd, DecodeDemand
from conductor.routing.load import EngineLoads
from conductor.routing.outlook import Ahead, Outlook, enter
from conductor.routing.output_lengths import TOKENS_MAX, OutputLengths
from conductor.routing.policy import Policy
from conductor.routing.recent import LoadSample, RecentLoad
from conductor.routing.shares import HALF_S, OUTPUT_WEIGHT, FairShares
from conductor.routing.work import Answer

_RETRY_AFTER_S_MAX: Final = 300
OVERLOADED: Final = "overloaded"
"""Code of the error of a request that is refused here."""
_NEW_PART_WEIGHT: Final = 0.02
"""Of the newest prompt in the moving average of the part that is computed."""
PROBE_S: Final = 10.0
"""A model without requests for so long gets one, whatever is expected of it."""
_ADMITTED: Final = "admitted"
_PROBE: Final = "probe"
_ADMISSIONS: Final = (_ADMITTED, _PROBE, "prefill", "decode", "late")
"""The labels of ``admission``: admitted, let through to measure, or the reason for the refusal."""


class AdmissionMode(enum.StrEnum):
    """How requests are judged."""

    NONE = "none"
    LOAD = "load"
    PREDICTION = "prediction"


class ServiceClass(msgspec.Struct, frozen=True):
    """Requests with the same objectives.

    Attributes:
        name: of the class.
        ttft_s: maximum seconds to the first token.
        tbt_s: maximum seconds between two tokens.
        priority: lower is more urgent: it is considered first.
    """

    name: str = "default"
    ttft_s: float = 30.0
    tbt_s: float = 0.1
    priority: int = 0


class AdmissionRules(msgspec.Struct, frozen=True):
    """The rules of admission.

    Attributes:
        mode: how requests are judged.
        classes: names of at least one class; the first is the class of requests that name none.
        fair: whether tenants above their fair share wait behind others.
    """

    mode: AdmissionMode = AdmissionMode.NONE
    classes: tuple[ServiceClass, ...] = (ServiceClass(),)
    fair: bool = False

    def named(self, name: str) -> ServiceClass:
        """The class of a name; the first if there is none."""
        return next((one for one in self.classes if one.name == name), self.classes[0])


EVERYBODY: Final = AdmissionRules()
"""No request is refused, and all are equal."""


@dataclass(slots=True)
class _Asked:
    """A request that has not ended.

    Attributes:
        service: its class.
        tenant: on whose behalf.
        session: conversation that it belongs to.
        limit: ``max_tokens``; None = it has none.
        output: tokens that its answer is expected to have.
        wanted: the requested model.
        computed: tokens of its prompt that are computed, and those before them; as usual for the
            length of its prompt until it is assigned.
        need_s: seconds of its prompt at its best engine; 0 = not judged.
        ready_at: when its KV was thought to be where it decodes; 0 = not judged.
        charged: what its tenant was charged for the prompt and the answer of its present try.
        charged_at: when.
        began_at: when it began to decode in this try; None = nobody has told.
        step_s: seconds of a decode step of its engines.
        counted: whether its outcome was counted.
        failed: whether an engine failed it.
        answered: tokens of its answer; 0 = it has not ended.
        model: of the engines that it has; empty = none.
        judgement: None = not judged yet.
    """

    service: ServiceClass
    tenant: str
    session: str
    limit: int | None
    output: float
    wanted: str
    computed: tuple[int, int]
    need_s: float = 0.0
    ready_at: float = 0.0
    charged: tuple[float, float] = (0.0, 0.0)
    charged_at: float = 0.0
    began_at: float | None = None
    step_s: float = 0.0
    counted: bool = False
    failed: bool = False
    answered: int = 0
    model: str = ""
    judgement: Judgement | None = None

    def generated(self, now: float) -> float:
        """Tokens of its answer that its engines could generate by now; nobody has told."""
        since, most = self.charged_at, self.charged[1]
        if self.began_at is not None:
            since, most = self.began_at, self.limit or TOKENS_MAX
        return min(most, max(0.0, now - since) / self.step_s) if self.step_s else most


class Admission:
    """The state of unfinished requests that matters for admission.

    Args:
        rules: the rules.
        loads: the work of the engines.
        policy: decides which node fetches what.

    Attributes:
        lengths: learned lengths of answers.
        recent: the load of the last minutes.
    """

    def __init__(self, rules: AdmissionRules, loads: EngineLoads, policy: Policy) -> None:
        assert rules.classes
        self.lengths = OutputLengths()
        self.recent = RecentLoad()
        self._new_part = 1.0
        self._rules = rules
        self._loads = loads
        self._policy = policy
        self._shares = FairShares()
        self._asked: dict[int, _Asked] = {}
        self._fresh: set[int] = set()  # not judged yet
        self._demand: dict[str, DecodeDemand] = {}  # by model
        self._counts: Counter[tuple[str, str]] = Counter()  # by class and outcome
        self._loads_seen: dict[str, tuple[float, float]] = {}  # by model: the newest
        self._busy_at: dict[str, float] = {}  # by model: when it last had a request to serve

    @property
    def judges(self) -> bool:
        """Whether requests can be refused: then the costs of engines are needed."""
        return self._rules.mode is not AdmissionMode.NONE

    @property
    def fresh(self) -> set[int]:
        """Requests that are judged in the next step, by number."""
        return self._fresh

    def arrived(
        self, number: int, prompt: tuple[str, int], *, tenant: str, session: str, limit: int | None,
        service: str,
    ) -> None:  # fmt: skip
        """A request waits.

        Args:
            number: of the request.
            prompt: the requested model, and the tokens of its prompt.
            tenant: on whose behalf; empty = unknown.
            session: conversation; empty = unknown.
            limit: ``max_tokens``; None = it has none.
            service: name of its class.
        """
        output = self.lengths.predict(tenant, session, limit)
        named = self._rules.named(service)
        new = round(prompt[1] * self._new_part)
        computed = (new, prompt[1] - new)
        self._asked[number] = _Asked(named, tenant, session, limit, output, prompt[0], computed)
        if self.judges:
            self._fresh.add(number)
        if self._rules.fair:
            self._shares.came(tenant)

    def output(self, number: int) -> float:
        """Tokens that the answer to a request is expected to have."""
        return self._asked[number].output

    def answer(self, number: int) -> Answer:
        """The expected length of the answer to a request."""
        asked = self._asked[number]
        return Answer(asked.output, asked.service.tbt_s)

    def priority(self, number: int) -> int:
        """Lower is more urgent."""
        return self._asked[number].service.priority

    def judgement(self, number: int) -> Judgement:
        """The prediction for a request."""
        asked = self._asked[number]
        if asked.judgement is None:
            return Judgement(asked.service.name, str(self._rules.mode), round(asked.output, 1))
        return asked.judgement

    def levels(self) -> dict[str, int]:
        """Tenants above their fair share, and how far."""
        return dict(self._shares.levels()) if self._rules.fair else {}

    # Judging

    def refusals(
        self, view: View, waiting: Waiting, rows: Sequence[int], now: float
    ) -> list[Reject]:
        """Judge new requests, and check whether the others can still be served in time.

        Args:
            view: the engines, with their costs.
            waiting: all waiting requests; ``matches`` of the requests to judge are up to date.
            rows: rows of ``waiting``, in the order in which they are considered.
            now: time.
        """
        if not self.judges:
            return []
        self._notice(now)
        refused: list[Reject] = []
        outlook = Outlook(view, self._loads, self._policy)
        before: dict[str, Ahead] = {}
        for row in rows:
            number = waiting.numbers[row]
            asked = self._asked[number]
            ahead = before.setdefault(waiting.models[row], Ahead())
            if number in self._fresh:
                self._fresh.remove(number)
                reject = self._judge(outlook, waiting, row, ahead, now)
            else:
                reject = self._too_late(waiting, row, now)
            if reject is not None:
                refused.append(reject)
                continue
            bound = waiting.bound[row]
            ahead.add(asked.need_s, (waiting.tokens[row] or 0) + asked.output, bound)
        return refused

    def _notice(self, now: float) -> None:
        """Count requests that decode by now, although no engine reports it."""
        for number, since, step_s in self._loads.begun():
            if number in self._asked:
                tokens = sum(self._asked[number].computed)
                self.decodes(number, tokens, step_s, now, since)

    def _judge(
        self, outlook: Outlook, waiting: Waiting, row: int, ahead: Ahead, now: float
    ) -> Reject | None:
        """Judge one request."""
        seen = outlook.of(waiting, row, ahead)
        if seen is None:
            return None  # nobody can serve it: the scheduler says why
        number = waiting.numbers[row]
        asked = self._asked[number]
        asked.need_s, asked.ready_at = seen.need_s, now + seen.computed_s
        service, demand = asked.service, self._demand_of(seen.pool.model, now)
        mine = Crowd(1, (waiting.tokens[row] or 0) + asked.output)
        ttft_s: float | None = None
        if self._rules.mode is AdmissionMode.LOAD:
            load = seen.pool.load(demand.now, service.tbt_s)
            waits_s = seen.pool.filled(demand.due) * demand.typical_s
            again_s = max(seen.queue_s, waits_s) - service.ttft_s
            why = "" if again_s < 0 else "prefill" if seen.queue_s >= waits_s else "decode"
            if seen.pool.step_s(demand.now) > service.tbt_s:
                why = "decode"
        else:
            entry = enter(demand, seen, (ahead.who, mine), service.tbt_s, now)
            load = entry.load
            prompt_s = now - waiting.arrived[row] + seen.computed_s + entry.step_s
            ttft_s = prompt_s + entry.waits_s
            again_s = ttft_s - service.ttft_s
            why = "" if again_s <= 0 else "prefill" if prompt_s > service.ttft_s else "decode"
        model = seen.pool.model
        probe = bool(why) and not ahead.who.size and self._measures_nothing(model, now)
        why = "" if probe else why
        asked.judgement = Judgement(
            service_class=service.name,
            admission=str(self._rules.mode),
            output_tokens=round(asked.output, 1),
            ttft_s=None if ttft_s is None else round(ttft_s, 4),
            prefill_load=round(seen.queue_s / service.ttft_s, 4),
            decode_load=round(load, 4),
            refused=why,
            probe=probe,
        )
        self._loads_seen[model] = (seen.queue_s / service.ttft_s, load)
        if why:
            return self._refuse(number, asked, again_s)
        self._busy_at[model] = now
        return None

    def _measures_nothing(self, model: str, now: float) -> bool:
        """Whether nobody has been served for a while, so that the costs cannot become better."""
        idle_s = now - self._busy_at.get(model, -inf)
        return not len(self._demand_of(model, now)) and idle_s >= PROBE_S

    def _too_late(self, waiting: Waiting, row: int, now: float) -> Reject | None:
        """Whether a request has waited so long that its prompt can no longer be computed in time.

        One that has failed at an engine is served, however late it is, and so is a probe.
        """
        asked = self._asked[waiting.numbers[row]]
        if self._rules.mode is not AdmissionMode.PREDICTION or asked.failed:
            return None
        waited_s = now - waiting.arrived[row]
        if waited_s + asked.need_s <= asked.service.ttft_s or asked.judgement is None:
            return None
        if asked.judgement.probe:
            return None
        asked.judgement = msgspec.structs.replace(asked.judgement, refused="late")
        return self._refuse(waiting.numbers[row], asked, asked.need_s)

    def _refuse(self, number: int, asked: _Asked, again_s: float) -> Reject:
        seen, service = asked.judgement, asked.service
        assert seen is not None
        self._count(asked, seen.refused)
        again = min(_RETRY_AFTER_S_MAX, max(1, ceil(again_s)))
        if seen.refused == "late":
            why = f"it waited too long to get its first token within {service.ttft_s:g} s"
        elif seen.refused == "decode":
            why = f"the engines that decode are at {seen.decode_load:.0%} of what they can take"
            why += " when it gets there" if seen.ttft_s is not None else ""
        elif seen.ttft_s is not None:
            why = f"its first token is expected after {seen.ttft_s:.1f} s, not {service.ttft_s:g}"
        else:
            why = f"prompts wait for {(seen.prefill_load or 0) * service.ttft_s:.1f} s already"
        reason = f"overloaded: {why} (class {service.name})"
        return Reject(number, reason, again, OVERLOADED, status=429, judgement=seen)

    def _count(self, asked: _Asked, outcome: str) -> None:
        """Count the outcome of a judged request, once."""
        if asked.judgement is not None and not asked.counted:
            asked.counted = True
            if outcome == _ADMITTED and asked.judgement.probe:
                outcome = _PROBE
            self._counts[asked.service.name, outcome] += 1

    def _demand_of(self, model: str, now: float) -> DecodeDemand:
        demand = self._demand.setdefault(model, DecodeDemand())
        demand.pass_time(now)
        return demand

    # What becomes of them

    def assigned(self, assign: Assign, model: str, tokens: int, step_s: float, now: float) -> None:
        """A request has engines.

        Args:
            assign: the assignment.
            model: model of the engines.
            tokens: tokens of the request's prompt.
            step_s: seconds of a decode step of these engines.
            now: time.
        """
        asked = self._asked[assign.request]
        new = max(0, tokens - assign.prefix_tokens)
        asked.computed = (new, tokens - new)
        if tokens:
            self._new_part += _NEW_PART_WEIGHT * (new / tokens - self._new_part)
        asked.model, asked.step_s, asked.began_at = model, step_s, None
        self._count(asked, _ADMITTED)
        if self.judges:
            starts_at = now + assign.ttft_s if assign.ttft_s else asked.ready_at
            stays_s = asked.output * step_s
            demand = self._demand_of(model, now)
            demand.comes(assign.request, tokens + asked.output, starts_at, stays_s)
        if self._rules.fair:
            asked.charged, asked.charged_at = (float(new), asked.output), now
            self._shares.charge(asked.tenant, new + OUTPUT_WEIGHT * asked.output, now)

    def decodes(
        self, number: int, tokens: int, step_s: float, now: float, since: float | None = None
    ) -> None:
        """A request starts to decode.

        Args:
            number: of the request.
            tokens: of its prompt.
            step_s: of the steps of its engine.
            now: time.
            since: when it started; None = now.
        """
        asked = self._asked[number]
        asked.began_at = now if since is None else since
        if asked.model and self.judges:
            demand = self._demand_of(asked.model, now)
            passed_s = max(0.0, now - asked.began_at)
            demand.decodes(number, tokens + asked.output, asked.output * step_s, passed_s)

    def ended(self, number: int, output_tokens: int, now: float) -> None:
        """A request has all its tokens; ``output_tokens`` as reported by the engine."""
        output_tokens = max(0, min(output_tokens, TOKENS_MAX))
        one = self._asked[number]
        one.answered = output_tokens
        self.lengths.learn(one.tenant, one.session, one.limit, one.output, output_tokens)
        if self._rules.fair:
            more = output_tokens - one.charged[1]
            self._shares.charge(one.tenant, OUTPUT_WEIGHT * more, now)
            one.charged = (0.0, 0.0)

    def failed(self, number: int, now: float) -> None:
        """An engine failed a request: its tenant is refunded the rest of its charge."""
        one = self._asked[number]
        prompt, answer = one.charged
        left = 0.5 ** ((now - one.charged_at) / HALF_S)
        one.charged, one.failed = (0.0, 0.0), True
        if self._rules.fair:
            self._shares.charge(one.tenant, -left * (prompt + OUTPUT_WEIGHT * answer), now)

    def stopped(self, number: int, now: float) -> None:
        """A request has no engines any more."""
        asked = self._asked[number]
        if asked.model in self._demand:
            self._demand[asked.model].left(number)
            self._busy_at[asked.model] = now
        asked.model = ""

    def left(self, number: int, now: float) -> None:
        """A request has ended, in whatever way.

        If its client has gone before its end, its tenant is charged for what was generated by then.
        """
        self.stopped(number, now)
        self._fresh.discard(number)
        asked = self._asked.pop(number)
        self._count(asked, _ADMITTED)
        output = asked.answered or round(asked.output)
        self.recent.ended(asked.wanted, LoadSample(*asked.computed, output))
        if self._rules.fair:
            if asked.charged[1]:
                kept = asked.charged[1] * 0.5 ** ((now - asked.charged_at) / HALF_S)
                more = asked.generated(now) - kept
                self._shares.charge(asked.tenant, OUTPUT_WEIGHT * more, now)
            self._shares.went(asked.tenant)

    def gauges(self) -> dict[str, dict[tuple[str, ...], float]]:
        """All that is worth knowing, as metrics."""
        names = [one.name for one in self._rules.classes] if self.judges else []
        return {
            **self.lengths.gauges(),
            "admission": {
                (name, outcome): float(self._counts[name, outcome])
                for name in names
                for outcome in _ADMISSIONS
            },
            "admission_load": {
                (model, side): load
                for model, loads in self._loads_seen.items()
                for side, load in zip(("prefill", "decode"), loads, strict=True)
            },
            "tenants_over_share": {(): float(len(self.levels()))},
        }

    def check(self, known: Collection[int]) -> None:
        """Assert the invariants; ``known`` are the requests that have not ended."""
        assert self._asked.keys() == set(known)
        assert self._fresh <= self._asked.keys()
        served = sum(bool(one.model) for one in self._asked.values())
        assert sum(map(len, self._demand.values())) == (served if self.judges else 0)
        for demand in self._demand.values():
            demand.check()
        self.lengths.check()
        self._shares.check()
