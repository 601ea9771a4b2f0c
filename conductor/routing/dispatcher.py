"""The dispatcher: which requests wait, which have places at engines, and what happens next.

::

    arrive ──► waits ──► Assign ──► computed in a pair ──► prefilled ──► waits for its decode
               ▲   │                     │      │                        engine ──► Continue
               │   └► Reject             │      │                           │          │
               └─────── failed ◄─────────┴──────┼───────────────────────────┼──────────┤
                                                └──► left ◄─────────────────┴──────────┘

Events go in (arrivals, completions, failures, time), and effects come out of :meth:`~Dispatcher.
step` as values. It is the only place that gives requests places at engines: an engine never has
more than ``max_running`` requests from us. A pair takes a place at its prefill engine when it is
assigned, and one at its decode engine when its KV arrives there, so that the place is not idle
while the prompt is computed; at once, if its protocol asks both engines at once. Then the part of
the prefill engine may go on when the request has ended: its place is *detached* from the request.

A request that failed at an engine waits again with its old number, so it is the first to be
considered, and never at that engine.

Pure: the caller passes the time. The asyncio queue is one caller, a simulator is another.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from conductor.costs.book import CostBook
from conductor.routing.admission import EVERYBODY, Admission, AdmissionRules
from conductor.routing.attainment import Attainment
from conductor.routing.binding import AHEAD_S
from conductor.routing.capacity import Targets
from conductor.routing.choices import Assign, Continue, Effect, Hold, Reject
from conductor.routing.columns import Matches, View, Waiting
from conductor.routing.engines import EngineRegistry
from conductor.routing.fleet import came, look, need
from conductor.routing.lending import Pools
from conductor.routing.load import EngineLoads
from conductor.routing.moving import Restored
from conductor.routing.occupancy import AT_HOME, Occupancy
from conductor.routing.pending import WaitingRow, WaitingRows
from conductor.routing.policy import Binding
from conductor.routing.requests import DispatchLimits, KnownRequest, Request, too_long, too_short
from conductor.routing.scheduler import Scheduler
from conductor.routing.work import ComingPrompt

_RETRY_AFTER_S_MAX: Final = 60


class Dispatcher:
    """All requests that have not ended.

    Args:
        registry: the engines.
        scheduler: makes the decisions.
        limits: bounds.
        book: the engines' costs; None = unknown.
        rules: the rules of admission and order.
        lends: whether mixed engines are lent to prompts or to tokens. They must be able to hand
            KV over then.

    Attributes:
        loads: the engines' work for them, and their speed.
        admission: decides which of them are refused because they would be served too late.
        pools: which mixed engines are lent; None = none ever is.
    """

    def __init__(
        self,
        registry: EngineRegistry,
        scheduler: Scheduler,
        limits: DispatchLimits,
        book: CostBook | None = None,
        rules: AdmissionRules = EVERYBODY,
        *,
        lends: bool = False,
    ) -> None:
        self._registry = registry
        self._scheduler = scheduler
        self._limits = limits
        self.loads = EngineLoads(book or CostBook())
        self.admission = Admission(rules, self.loads, scheduler.policy)
        first = rules.classes[0]
        self._attained = Attainment(Targets(first.ttft_s, first.tbt_s))
        self.pools = Pools(self._attained) if lends else None
        self._learned: set[int] = set()  # since the last step, without an assignment
        self._stepped_at = -math.inf
        self._known: dict[int, KnownRequest] = {}
        self._waiting: dict[int, KnownRequest] = {}  # without an assignment
        self._rows = WaitingRows()  # these, as columns
        self._arrived: dict[int, KnownRequest] = {}  # whose KV waits for a decode engine
        self._effects: list[Effect] = []  # until they are taken
        self._places = Occupancy(self.loads.others)
        self._closed = False

    def __len__(self) -> int:
        """Requests that wait for an engine."""
        return len(self._waiting) + len(self._arrived)

    @property
    def unassigned(self) -> Iterable[KnownRequest]:
        """Requests that wait for engines, in no order; only to look at."""
        return self._waiting.values()

    def in_flight(self, engine_id: str) -> int:
        """Requests that have a place at an engine."""
        return self._places.in_flight[engine_id]

    @property
    def requests_max(self) -> int:
        """Maximum requests in total: waiting and in flight at engines."""
        return self._limits.waiting_max + sum(one.info.max_running for one in self._registry)

    @property
    def retry_after_s(self) -> int:
        """Estimated seconds until the waiting requests are served, 1 to 60."""
        return min(_RETRY_AFTER_S_MAX, max(1, math.ceil(len(self) * self._places.pace_s)))

    @property
    def wake_at(self) -> float | None:
        """When :meth:`step` must be called at the latest; None = not before the next event."""
        arrived = WaitingRows(map(self._row, self._arrived.values()))
        at = min(self._rows.wake_at(self._stepped_at), arrived.wake_at(self._stepped_at))
        if self._waiting and self._scheduler.policy.binds is Binding.LATE:
            return min(self.loads.free_at(AHEAD_S, self._stepped_at), at)
        return at if self._waiting or self._arrived else None

    def arrive(self, request: Request) -> None:
        """A request arrives; it is rejected if too many wait, or after :meth:`close`."""
        assert request.number not in self._known
        self.admission.recent.came(request.model, request.arrived)
        if self.pools is not None:
            came(self.pools, self._registry, request.model, request.arrived)
        if self._closed:
            self._effects.append(request.closing())
        elif len(self._waiting) >= self._limits.waiting_max:
            self._effects.append(request.queue_full(len(self._waiting), self.retry_after_s))
        elif (long := too_long(request, self._registry.infos(request.model))) is not None:
            self._effects.append(long)
        else:
            short = too_short(self._registry.infos(request.model), request.length)
            known = KnownRequest(request, request.arrived + self._limits.wait_s, short)
            self._known[request.number] = known
            self.admission.arrived(
                request.number, (request.model, request.tokens or 0), tenant=request.tenant,
                session=request.session, limit=request.output_max, service=request.service,
            )  # fmt: skip
            self._tell(known)
            self._wait(known)

    def began(self, number: int, now: float, hit_tokens: int | None = None) -> None:
        """A request has its first token, so that its prompt is computed; may be called again.

        Args:
            number: of the request.
            now: time.
            hit_tokens: prompt tokens that were not computed; None = unknown.
        """
        known = self._known.get(number)
        if known is None or known.assign is None:
            return
        self._attained.began(number, now)
        self.loads.computed(number, known.assign.prefill, now, hit_tokens)
        self.loads.sent(number, now)
        for engine_id in known.held:
            self.loads.arrived(number, engine_id, now)
        if known.assign.decode in known.held:
            self._decodes(known, known.assign.decode, now, reported=True)

    def ended(
        self, number: int, output_tokens: int, now: float, restored: Restored | None = None, *,
        read_slowly: bool = False,
    ) -> None:  # fmt: skip
        """A request has all its tokens; call :meth:`release` or :meth:`left` next.

        Args:
            number: of the request.
            output_tokens: of its answer.
            now: time.
            restored: what the engine fetched that served it alone; None = it does not tell, or
                there were two.
            read_slowly: whether its client, not its engine, says how long the answer took.
        """
        for engine_id in self._known[number].held:
            if not read_slowly:
                self.loads.decoded(number, engine_id, output_tokens, now)
            if restored is not None:
                self.loads.restored(number, engine_id, restored)
        self.admission.ended(number, output_tokens, now)
        self._attained.ended(number, output_tokens, now, read_slowly=read_slowly)

    def _decodes(self, known: KnownRequest, engine_id: str, now: float, *, reported: bool) -> None:
        """A request decodes from now on; ``reported``: its first token was."""
        engine = self._registry.get(engine_id)
        if engine is not None:
            number, tokens = known.request.number, known.request.tokens or 0
            answer, rank = self.admission.answer(number), known.rank(engine_id)
            self.loads.decodes(number, engine.info, tokens, now, answer, rank, is_reported=reported)
            step_s = self.loads.step_s(engine.info)
            self.admission.decodes(number, tokens, step_s, now)

    def prefilled(
        self, number: int, now: float, hit_tokens: int | None = None,
        restored: Restored | None = None,
    ) -> None:  # fmt: skip
        """The prefill engine of a pair has done its part; the KV goes to the decode engine.

        Args:
            number: of the request.
            now: time.
            hit_tokens: prompt tokens that it did not compute; None = unknown.
            restored: number of the hit tokens that it fetched; None = unknown.
        """
        known = self._known[number]
        assert known.assign is not None
        self.loads.computed(number, known.assign.prefill, now, hit_tokens, restored)
        self.released(number, known.assign.prefill, now)
        if not known.assign.at_once:
            known.arrived = True
            known.deadline = now + self._limits.wait_s
            self._arrived[number] = known

    def released(self, number: int, engine_id: str, now: float) -> None:
        """An engine has done its part of a request; a second call does nothing."""
        known = self._known.get(number)
        if known is None or engine_id not in known.held:
            return
        known.held.remove(engine_id)
        self._free(number, engine_id, now)

    def detach(self, number: int, engine_id: str) -> None:
        """Keep a place of a request until :meth:`give_back`, even after the request ends."""
        known = self._known[number]
        known.held.remove(engine_id)
        self._places.detach(engine_id)

    def give_back(self, number: int, engine_id: str, now: float) -> None:
        """An engine has ended its part of a request whose place there was detached."""
        self._places.undetach(engine_id)
        self._free(number, engine_id, now)

    def _free(self, number: int, engine_id: str, now: float) -> None:
        self.loads.left(number, engine_id, now)
        self._places.free(engine_id, now, waited_for=len(self) > 0)

    def failed(self, number: int, engine_id: str, why: str, now: float) -> None:
        """An engine failed a request: it waits for others, or is rejected after the last try."""
        known = self._known[number]
        self._give_back(known, now)
        self.admission.failed(number, now)
        if self._closed:
            self._refuse(known, known.request.closing())
        elif known.tries >= self._limits.tries:
            self._refuse(known, known.engines_failed(why, self.retry_after_s))
        else:
            known.assign = None
            known.excluded |= {engine_id}
            known.bound = ""
            known.deadline = now + self._limits.wait_s
            self._wait(known)

    def left(self, number: int, now: float) -> None:
        """A request has ended, or its client has gone; unknown ones are ignored."""
        known = self._known.get(number)
        if known is not None:
            self._give_back(known, now)
            self._remove(known, now)

    def forget(self, engine_id: str) -> None:
        """An engine was removed; requests there keep their places until they are released."""
        self._places.forget(engine_id)
        self.loads.forget(engine_id)

    def close(self) -> None:
        """Reject all waiting and new requests."""
        self._closed = True
        for known in (*self._waiting.values(), *self._arrived.values()):
            self._refuse(known, known.request.closing())

    def due(self, now: float) -> list[tuple[int, str]]:
        """Number and model of each request whose prefixes decide something now.

        They are passed to :meth:`learn` before the next :meth:`step`.
        """
        if not self._waiting or not self._scheduler.policy.needs_prefixes:
            return []
        waiting = self._rows.columns
        rows = self._scheduler.due(self.view(now), waiting, now)
        found = {waiting.numbers[row]: waiting.models[row] for row in rows}
        found |= {one: self._known[one].request.model for one in sorted(self.admission.fresh)}
        return list(found.items())

    def learn(self, number: int, matches: Matches) -> None:
        """How much of the prompt of a waiting request each engine has."""
        known = self._waiting[number]
        known.matches = matches
        self._tell(known)
        self._rows.columns.matches[self._rows.at(number)] = matches
        self._learned.add(number)

    def step(self, now: float) -> list[Effect]:
        """Decide what can be decided now; a request gets no further effect after a Reject.

        If this fails, :meth:`decided` has what was decided before.
        """
        self._stepped_at = now
        if self.pools is not None:
            self.view(now)  # engines have computed by now what they should; `due` may have looked
            look(self.pools, self._registry, self.loads, now)
        if self._arrived:
            self._receive(now)
        if self._waiting:
            view = self.view(now)
            self._admit(view, self._priced(view), now)
            for decision in self._scheduler.schedule(view, self._rows.columns, now):
                if not isinstance(decision, Hold):
                    self._carry_out(decision, now)
                elif decision.engine:
                    self._waiting[decision.request].bound = decision.engine
                    self._rows.bind(decision.request, decision.engine)
                    self._learned.add(decision.request)  # what it needs there
        return self.decided()

    def decided(self) -> list[Effect]:
        """Take the effects that were not taken yet."""
        effects, self._effects = self._effects, []
        return effects

    def _carry_out(self, effect: Effect, now: float) -> None:
        """Carry out a decision; if that fails, its request is refused and nothing is left of it."""
        known = self._known[effect.request]
        try:
            match effect:
                case Assign():
                    self._give(known, effect, now)
                case Continue():
                    self._continue(known, effect, now)
                case Reject():
                    self.left(effect.request, now)
        except BaseException:
            self._refuse(known, known.request.broken())
            raise
        self._effects.append(effect)

    def _admit(self, view: View, waiting: Waiting, now: float) -> None:
        """Refuse the unassigned requests that are not admitted."""
        if self.admission.judges:
            rows = self._scheduler.order(view, waiting, now)
            for reject in self.admission.refusals(view, waiting, rows, now):
                self._carry_out(reject, now)

    def _priced(self, view: View) -> Waiting:
        """Those without an assignment, with the seconds that their prompts need now."""
        waiting = self._rows.columns
        if view.costs is not None:
            numbers = sorted(self._learned & self._waiting.keys())
            rows = [self._rows.at(number) for number in numbers]
            seconds = self._scheduler.least_s(view, waiting, rows)
            for number, row, least_s in zip(numbers, rows, seconds, strict=True):
                self._waiting[number].least_s = waiting.least_s[row] = least_s
        self._learned.clear()
        return waiting

    def _receive(self, now: float) -> None:
        """Give places at decode engines to those whose KV has arrived."""
        waiting = WaitingRows(map(self._row, self._arrived.values())).columns
        handoffs = [self._arrived[number].handoff for number in waiting.numbers]
        choices = self._scheduler.receive(self.view(now), waiting, handoffs, now)
        for row, choice in choices.items():
            if isinstance(choice, str):
                number = waiting.numbers[row]
                rank = self._known[number].rank(choice)
                self._carry_out(Continue(number, choice, rank), now)
            elif isinstance(choice, Reject):
                self._carry_out(choice, now)

    def _continue(self, known: KnownRequest, chosen: Continue, now: float) -> None:
        """Take the place of a request whose KV has arrived; first that, as in :meth:`_give`."""
        number, decode, promised = chosen.request, chosen.decode, known.promised
        assert known.assign is not None
        assert promised is not None
        if decode != promised:
            self._places.chosen([decode])
        known.promised, known.arrived = None, False
        self._places.unpromise(promised)
        known.held.append(decode)
        self._places.take(decode)
        del self._arrived[number]
        self.loads.left(number, promised, now)
        known.assign = replace(known.assign, decode=decode)
        self._decodes(known, decode, now, reported=False)  # its KV is on its way
        engine = self._registry.get(decode)
        if engine is not None:
            self.loads.hands_over(number, engine.info, known.missing(decode), now)

    def _give(self, known: KnownRequest, assign: Assign, now: float) -> None:
        """Take the places of an assignment; first that, so that they can be given back."""
        del self._waiting[assign.request]
        self._rows.drop(assign.request)
        assert not known.held
        known.assign = assign
        known.tries += 1
        engine_ids = list(dict.fromkeys((assign.prefill, assign.decode)))
        self._places.chosen(engine_ids)
        for engine_id in engine_ids:
            if engine_id == assign.prefill or assign.at_once:
                known.held.append(engine_id)
                self._places.take(engine_id)
            else:
                known.promised = engine_id
                self._places.promise(engine_id)
        self._load(known, assign, now)
        self.loads.foreseen(assign.ttft_s + now - known.request.arrived)
        self._attained.assigned(assign.request)

    def _load(self, known: KnownRequest, assign: Assign, now: float) -> None:
        """Add the work of an assignment to its engines."""
        first, second = self._registry.get(assign.prefill), self._registry.get(assign.decode)
        tokens = known.request.tokens or 0
        prefix = max(0, min(assign.prefix_tokens, tokens - 1))
        of = (tokens - prefix, prefix)
        if first is not None:
            prefill_s = assign.prefill_s
            if self.admission.judges and not prefill_s:
                prefill_s = self.loads.prefill_seconds(first.info, *of)
            seconds = (assign.fetch_s, prefill_s)
            self.loads.assigned(assign.request, first.info, of, seconds, now, assign.fetch)
        if second is not None:
            if second is not first:
                coming = ComingPrompt(tokens, known.missing(assign.decode))
                self.loads.comes(assign.request, second.info, coming, assign.prefill, now)
            step_s = self.loads.step_s(second.info)
            self.admission.assigned(assign, second.info.model, tokens, step_s, now)
        self._tell(known)

    def _tell(self, known: KnownRequest) -> None:
        """Report the request's data to the pools."""
        if self.pools is not None and known.request.tokens:
            needs = known.needs(self.admission.output(known.request.number))
            need(self.pools, self._registry, known.request, needs)

    def _give_back(self, known: KnownRequest, now: float) -> None:
        """Give all places of a request back."""
        self.admission.stopped(known.request.number, now)
        for engine_id in tuple(known.held):
            self.released(known.request.number, engine_id, now)
        if known.promised is not None:
            self.loads.left(known.request.number, known.promised, now)
            self._places.unpromise(known.promised)
            known.promised, known.arrived = None, False
        self._arrived.pop(known.request.number, None)

    def _refuse(self, known: KnownRequest, reject: Reject) -> None:
        self._effects.append(reject)
        self.left(known.request.number, self._stepped_at)

    def _remove(self, known: KnownRequest, now: float) -> None:
        number = known.request.number
        del self._known[number]
        self._arrived.pop(number, None)
        if self._waiting.pop(number, None) is not None:
            self._rows.drop(number)
        self._attained.left(number)
        self.admission.left(number, now)
        self.loads.sent(number, now)

    def _wait(self, known: KnownRequest) -> None:
        self._waiting[known.request.number] = known
        self._rows.add(self._row(known))

    def _row(self, known: KnownRequest) -> WaitingRow:
        number, admission = known.request.number, self.admission
        return known.row(admission.priority(number), admission.output(number))

    def view(self, now: float) -> View:
        """The engines, in columns."""
        priced = self._scheduler.policy.fetches is not None or self.admission.judges
        loads = self.loads if priced else None
        lent = self.pools.lent if self.pools is not None else AT_HOME
        view = self._places.view(self._registry, loads, self.retry_after_s, now, lent)
        over = self.admission.levels()
        return replace(view, over=over) if over else view

    def lent(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Which mixed engines are lent, as metrics."""
        return self.pools.gauges() if self.pools is not None else {}

    def check(self) -> None:
        """Assert the invariants."""
        for number, known in self._known.items():
            known.check(waits=number in self._waiting, arrived=number in self._arrived)
        held = Counter(engine_id for known in self._known.values() for engine_id in known.held)
        promised = Counter(one.promised for one in self._known.values() if one.promised is not None)
        self._places.check(held, promised)
        assert self._waiting.keys() | self._arrived.keys() <= self._known.keys()
        self.loads.check()
        self.admission.check(self._known)
        self._rows.check([self._row(known) for known in self._waiting.values()])
