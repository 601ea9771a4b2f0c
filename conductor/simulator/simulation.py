"""The events of a simulation, in order of time: arrivals, engines, links, failures.

::

    arrival → Assign → fetch → prefill → (wait for a place) → Continue → handoff → decode → end

Pure: it has no clock, no I/O and no randomness.
"""

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from conductor.costs.book import CostBook
from conductor.routing.choices import Assign, Continue, Reject
from conductor.routing.columns import Matches
from conductor.routing.desk import Desk
from conductor.routing.journal import JournalHead, Line
from conductor.routing.moving import Restored
from conductor.routing.policy import POLICIES, Binding
from conductor.routing.requests import Request
from conductor.simulator.batching import BatchEngine, EngineLimits, Work
from conductor.simulator.caching import Caching
from conductor.simulator.fetching import leader_of, worth_fetching
from conductor.simulator.fleet import SimulatedEngine, bandwidths, cache_limits
from conductor.simulator.links import Link, Links
from conductor.simulator.prefetching import PERIOD_S, Prefetching
from conductor.simulator.samples import EngineLoad, Sample
from conductor.simulator.scenario import NEVER, Flight, Record, Scenario
from conductor.simulator.skew import SkewedBook
from conductor.simulator.steps import StepTimes, TrueSteps
from conductor.simulator.trace import BLOCK_TOKENS, TracedRequest
from conductor.simulator.transfers import Transfers
from kvstore.protocol.errors import InvalidArgument


class Simulation:
    """One run.

    Attributes:
        records: what became of each request, in order of the trace.
        ended: records of the ended requests, in order of their ends.
        samples: of load, if the scenario wants them.
        journal: inputs and decisions of the dispatcher, if the scenario wants them.
        head: what the dispatcher was made of.
        now: seconds after the first arrival.
        events: events so far.

    Raises:
        InvalidArgument: no engine can serve, or a failing one does not exist.
    """

    def __init__(
        self, trace: Sequence[TracedRequest], engines: Sequence[SimulatedEngine], scenario: Scenario
    ) -> None:
        self.scenario = scenario
        self.records = [Record(one, one.at_s / scenario.speed) for one in trace]
        self.ended: list[Record] = []
        self.samples: list[Sample] = []
        self.journal: list[Line] = []
        self.now = 0.0
        self.events = 0
        self._engines = {one.info.id: one for one in engines}
        self.head = JournalHead(
            scenario.policy, [one.info for one in engines], scenario.waiting_max,
            scenario.wait_s if scenario.wait_s < NEVER else None, scenario.tries, scenario.rules,
            scenario.skew, scenario.lends,
        )  # fmt: skip
        skew = self.head.skew
        dispatcher, registry = self.head.dispatcher(SkewedBook(skew) if skew else CostBook())
        if not registry.can_serve():
            raise InvalidArgument("engines", "prefill and decode engines are needed, or mixed ones")
        write = self.journal.append if scenario.journal else None
        self.desk = Desk(dispatcher, registry, self._find, write)
        self._batches = {one.info.id: self._batch(one) for one in engines}
        self.caching = Caching({one.info.id: cache_limits(one, scenario) for one in engines})
        self.links = Links(bandwidths(engines, scenario))
        self.transfers = Transfers(self.links, self._at, lambda: self.now)
        self.prefetching = Prefetching(
            self.desk, self.caching, self.transfers, scenario.bring_bytes,
            {one.info.id: one.kv_bytes * BLOCK_TOKENS for one in engines},
            lambda number: self.records[number - 1].request,
        )  # fmt: skip
        self._brings = False  # a look at those who wait is planned
        self._flights: dict[int, Flight] = {}
        self._events: list[tuple[float, int, Callable[[int], None], int]] = []
        self._order = 0
        self._turns = dict.fromkeys(self._engines, 0)  # makes older events of engines void
        self._next = 0  # request that arrives
        self._dead: set[str] = set()
        self._wake: float | None = None
        self._late = POLICIES[scenario.policy].binds is Binding.LATE
        self._dirty = False
        for number, failure in enumerate(scenario.failures):
            if failure.engine not in self._engines:
                raise InvalidArgument("failures", f"there is no engine {failure.engine!r}")
            self._at(failure.at_s, self._fail, number)
            if failure.back_s < NEVER:
                self._at(failure.back_s, self._return, number)
        if scenario.sample_s:
            self._at(0.0, self._sample, 0)

    def _batch(self, one: SimulatedEngine) -> BatchEngine:
        limits = EngineLimits(one.room_tokens, self.scenario.chunk_tokens, one.info.max_running)
        return BatchEngine(
            TrueSteps(one.times, one.factor), limits, lambda work: self._prefix(work, one.info.id)
        )

    # Time

    def run(self) -> None:
        """Simulate until every request has ended."""
        while self.step():
            pass
        assert not self._flights
        assert all(record.outcome for record in self.records)
        assert not any(batch.reserved for batch in self._batches.values())
        if all(record.tries <= 1 and record.outcome != "broken" for record in self.records):
            served = [record for record in self.records if record.outcome == "ok"]
            generated = sum(batch.generated for batch in self._batches.values())
            assert generated == sum(record.request.output for record in served)

    def step(self) -> bool:
        """Do what happens at the next time; False = nothing is left."""
        arrival = self.records[self._next].arrived if self._next < len(self.records) else NEVER
        event = self._events[0][0] if self._events else NEVER
        wake = NEVER if self._wake is None else self._wake
        at = min(arrival, event, wake)
        if at == NEVER:
            return False
        assert at >= self.now
        self.now = at
        while self._events and self._events[0][0] <= at:
            _, _, act, what = heapq.heappop(self._events)
            self.events += 1
            act(what)
        while self._next < len(self.records) and self.records[self._next].arrived <= at:
            self._arrive(self.records[self._next])
            self._next += 1
        if wake <= at:
            self._wake, self._dirty = None, True
        while self._dirty:
            self._dirty = False
            self._dispatch()
        return True

    def _at(self, when: float, act: Callable[[int], None], what: int) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, act, what))

    def times(self, engine: str) -> StepTimes:
        """How long the steps of an engine are thought to take."""
        return self._engines[engine].times

    # Requests

    def _find(self, number: int, _: str) -> Matches:
        return self.caching.matches(self.records[number - 1].request)

    def _arrive(self, record: Record) -> None:
        one = record.request
        self.events += 1
        self._dirty = True
        self._plan_bringing()
        self.desk.arrive(
            Request(
                number=one.number, model=self.head.engines[0].model, arrived=record.arrived,
                tokens=one.tokens, keys=np.array(one.blocks, dtype=np.uint64), tenant=one.tenant,
                session=one.session, service=one.service, output_max=one.output_max,
            )
        )  # fmt: skip

    def _dispatch(self) -> None:
        for effect in self.desk.step(self.now):
            record = self.records[effect.request - 1]
            if isinstance(effect, Assign):
                self._assigned(record, effect)
            elif isinstance(effect, Continue):
                self._continue(self._flights[effect.request], effect)
            else:
                self._rejected(record, effect)
        if self._late or (self._wake is None and self.scenario.wait_s < NEVER):
            # Of deadlines, an old one is early enough until it has passed: who comes later waits
            # longer. A policy that binds late wants to be called when engines come free.
            wake = self.desk.dispatcher.wake_at
            self._wake = None if wake is None or wake == NEVER else max(wake, self.now)

    def _rejected(self, record: Record, reject: Reject) -> None:
        flight = self._flights.pop(record.request.number, None)
        if flight is not None:  # its KV waited for a decode engine
            self._leave(flight)
        self._end(record, "rejected", reject.code)

    def _end(self, record: Record, outcome: str, code: str = "") -> None:
        assert not record.outcome
        self.prefetching.went(record.request.number, None)
        record.outcome, record.code, record.ended = outcome, code, self.now
        self.ended.append(record)

    def _assigned(self, record: Record, assign: Assign) -> None:
        one = record.request
        record.tries += 1
        record.prefill, record.decode = assign.prefill, assign.decode
        self.prefetching.went(one.number, assign.prefill)
        record.predicted_hit = assign.prefix_tokens
        if record.assigned is None:
            record.assigned = self.now
        alone = assign.prefill == assign.decode
        if one.tokens + one.output > min(
            self._engines[name].room_tokens for name in (assign.prefill, assign.decode)
        ):
            self.desk.left(one.number, self.now)
            self._end(record, "too_long")
            self._dirty = True
            return
        decides = POLICIES[self.scenario.policy].fetches is not None
        fetches = self.scenario.peers and (assign.fetch.network > 0 or not decides)
        flight = Flight(record, assign.prefill, assign.decode, fetches=fetches)
        self._flights[one.number] = flight
        factor = self.scenario.factor(one.number)
        output = one.output if alone else 0
        self._fetch(flight, Work(one.number, one.tokens, output, factor=factor))
        self._expect(flight, assign.prefill)
        self._expect(flight, assign.decode)

    def _expect(self, flight: Flight, engine: str) -> None:
        if engine not in flight.expected:
            flight.expected.add(engine)
            self.caching.expect(flight.record.request, engine)

    def _unexpect(self, flight: Flight, engine: str) -> None:
        if engine in flight.expected:
            flight.expected.remove(engine)
            self.caching.unexpect(flight.record.request, engine)

    def _leave(self, flight: Flight) -> None:
        """A request ends, or has to start again: nobody keeps anything for it."""
        number = flight.record.request.number
        for transfer in flight.transfers:
            self.transfers.stop(transfer)
        for engine in tuple(flight.expected):
            self._unexpect(flight, engine)
        if flight.prefill not in self._dead:
            self._batches[flight.prefill].release(number)
            self._resume(flight.prefill)

    # From where the KV of a prompt comes

    def _fetch(self, flight: Flight, work: Work) -> None:
        """Bring what the node, or a peer of it, has of a prompt, if that pays; then queue it."""
        engine, one = flight.prefill, flight.record.request
        sources = self.caching.sources(one, engine)
        wanted, end = worth_fetching(
            sources, self._engines[engine], self.links, peers=flight.fetches
        )
        flight.fetched = range(sources.start, end)
        began = self.now

        def ready(_: int) -> None:
            if not flight.transfers:
                if wanted:
                    tokens = len(flight.fetched) * BLOCK_TOKENS
                    flight.restored = Restored(tokens, self.now - began)
                self.caching.fetched(one, engine, flight.fetched)
                self._add(engine, work)
                for follower in flight.followers:
                    follower(0)

        for links, size in wanted:
            self._transfer(flight, links, size, ready)
        leader = None if wanted else leader_of(self._flights.values(), flight, sources.start)
        if leader is not None:
            leader.followers.append(ready)
        else:
            ready(0)

    def _transfer(
        self, flight: Flight, links: tuple[Link, ...], size: float, then: Callable[[int], None]
    ) -> None:
        def ended() -> None:
            flight.transfers.remove(transfer)
            then(flight.record.request.number)

        transfer = self.transfers.start(links, size, ended)
        flight.transfers.add(transfer)

    # What is brought to nodes for those who wait

    def _plan_bringing(self) -> None:
        if self.scenario.bring_bytes and not self._brings:
            self._brings = True
            self._at(self.now + PERIOD_S, self._bring, 0)

    def _bring(self, _: int) -> None:
        self._brings = False
        self.prefetching.look(self.now)
        if len(self.desk.dispatcher):
            self._plan_bringing()

    def _prefix(self, work: Work, engine: str) -> int:
        flight = self._flights[work.number]
        return self.caching.prefix(flight.record.request, engine, flight.fetched)

    # Engines

    def _add(self, engine: str, work: Work) -> None:
        self._batches[engine].add(work, self.now)
        self._plan(engine)

    def _resume(self, engine: str) -> None:
        batch = self._batches[engine]
        if batch.ends_at is None:
            batch.resume(self.now)
            self._plan(engine)

    def _plan(self, engine: str) -> None:
        """Be called when the engine's stretch ends."""
        self._turns[engine] += 1
        at, joined = self._batches[engine].first_tokens()
        for number in joined:
            self._at(at, self._begins(self._flights[number]), number)
        turn, ends_at = self._turns[engine], self._batches[engine].ends_at
        if ends_at is not None:
            act = self._advances(engine)
            self._at(max(ends_at, self.now), act, turn)

    def _begins(self, flight: Flight) -> Callable[[int], None]:
        def begin(number: int) -> None:
            if self._flights.get(number) is flight:
                self.desk.began(number, self.now)

        return begin

    def _advances(self, engine: str) -> Callable[[int], None]:
        def advance(turn: int) -> None:
            if turn == self._turns[engine]:
                self._advance(engine)

        return advance

    def _advance(self, engine: str) -> None:
        batch = self._batches[engine]
        computed, ended = batch.advance(self.now)
        for work in computed:
            self._computed(self._flights[work.number], engine, work)
        for work in ended:
            self._served(self._flights.pop(work.number), work)
        self._resume(engine)

    def _computed(self, flight: Flight, engine: str, work: Work) -> None:
        """The prompt's KV is there."""
        flight.computed = True
        record = flight.record
        record.hit_tokens = work.prefix
        self._unexpect(flight, engine)
        self.caching.computed(record.request, engine, self._batches[engine].reserved)
        if flight.prefill == flight.decode:
            flight.continued = True
            self.desk.began(work.number, self.now)
        else:
            self.desk.prefilled(work.number, self.now, work.prefix, flight.restored)
        self._dirty = True  # the engine can get its next prompt, whoever decodes this one

    def _continue(self, flight: Flight, effect: Continue) -> None:
        """The decode engine has a place: its part of the KV that it does not have goes there."""
        if effect.decode != flight.decode:
            self._unexpect(flight, flight.decode)
            self._expect(flight, effect.decode)
        flight.decode = flight.record.decode = effect.decode
        flight.continued = True
        one = flight.record.request
        there = self.caching.prefix(one, flight.decode, range(0))
        size = (one.tokens - there) * self._engines[flight.prefill].kv_bytes
        links = (("out", flight.prefill), ("in", flight.decode))
        self._transfer(flight, links, size * self.scenario.handoff_part, self._handed_over)

    def _handed_over(self, number: int) -> None:
        flight = self._flights[number]
        one, engine = flight.record.request, flight.decode
        self._batches[flight.prefill].release(number)
        self._resume(flight.prefill)
        self._unexpect(flight, engine)
        self.caching.received(one, engine, self._batches[engine].reserved)
        self._add(engine, Work(number, one.tokens, one.output, here=True))

    def _served(self, flight: Flight, work: Work) -> None:
        record = flight.record
        record.first_s, record.tbt_s = work.first_s, work.tbt_s
        self._leave(flight)
        restored = flight.restored if flight.prefill == flight.decode else None
        self.desk.ended(work.number, work.output, self.now, restored)
        self.desk.left(work.number, self.now)
        self._end(record, "ok")
        self._dirty = True

    # Failures

    def _fail(self, number: int) -> None:
        engine = self.scenario.failures[number].engine
        if engine in self._dead:
            return
        self._dead.add(engine)
        self._turns[engine] += 1
        begun = self._batches[engine].cancel(self.now)
        self.caching.lose(engine, node=True)
        self.desk.health(engine, self.now, ok=False)
        for one in [flight for flight in self._flights.values() if engine in flight.where]:
            request = one.record.request.number
            del self._flights[request]
            self._leave(one)
            if request in begun:
                self.desk.left(request, self.now)
                self._end(one.record, "broken")
            else:
                self.desk.failed(request, engine, "it died", self.now)
        self._dirty = True

    def _return(self, number: int) -> None:
        engine = self.scenario.failures[number].engine
        if engine in self._dead:
            self._dead.remove(engine)
            self.desk.health(engine, self.now, ok=True)
            self._dirty = True

    # Load

    def _sample(self, _: int) -> None:
        """Write down what every engine does now."""
        waiting = len(self.desk.dispatcher)
        loads = {name: EngineLoad.of(one, self.now) for name, one in self._batches.items()}
        self.samples.append(Sample(self.now, waiting, loads))
        if self._next < len(self.records) or self._flights or waiting:
            self._at(self.now + self.scenario.sample_s, self._sample, 0)

    def check(self) -> None:
        """Assert the invariants of all parts."""
        self.desk.dispatcher.check()
        for name, batch in self._batches.items():
            batch.check()
            info = self._engines[name].info
            assert self.desk.dispatcher.in_flight(name) <= info.max_running
        flights = self._flights.values()
        moving = [one for flight in flights for one in flight.transfers]
        self.transfers.check([*moving, *self.prefetching.moving])
        sent = [(flight.record.request, name) for flight in flights for name in flight.expected]
        self.caching.check(sent)
        for number, flight in self._flights.items():
            assert not flight.record.outcome
            if flight.continued and not flight.transfers and flight.prefill != flight.decode:
                assert not flight.expected
                assert not self._batches[flight.prefill].holds(number)
