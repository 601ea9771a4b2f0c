"""Goal: policies in seconds choose what a model chooses that tries every engine and pair.

The dispatcher runs as in :mod:`tests.conductor.routing.test_dispatcher_model`. Each call of its
scheduler is compared with scalars: what each engine would take, one request after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from conductor.routing.binding import AHEAD_S
from conductor.routing.choices import Assign, Decision, Hold, Plan
from conductor.routing.columns import Prefix, View, Waiting
from conductor.routing.engines import EngineInfo, Role
from conductor.routing.policy import (
    AGING,
    FIRST_TOKENS,
    KVCACHE_BALANCING_THRESHOLD,
    OVERTAKEN,
    POLICIES,
    WORK,
    Binding,
)
from conductor.routing.requests import Request
from conductor.routing.scheduler import Scheduler
from tests.conductor.routing.test_dispatcher_model import AT_ONCE, ENGINES, ModelOfDispatcher

ASKED_ALIKE = 4
"""More who wait are not asked one after another by a policy that binds late."""
TOKENS = (40, 3_000, 20_000, 90_000)
CLOSE = 1e-9


@dataclass
class Priced:
    """One engine or pair, in seconds.

    Attributes:
        cost: what the policy compares.
        own_s: to fetch and to compute.
        ttft_s: until the first token.
        decoders: the engines that are equally good to decode.
    """

    cost: float
    own_s: float
    ttft_s: float
    decoders: list[str]


class BruteForce:
    """One call of the scheduler, in scalars."""

    def __init__(self, machine: "SecondsModel", view: View, waiting: Waiting, now: float) -> None:
        self.machine, self.view, self.waiting, self.now = machine, view, waiting, now
        self.policy = POLICIES[machine.POLICY]
        self.late = self.policy.binds is Binding.LATE
        self.in_flight = dict(zip(view.ids, view.in_flight.tolist(), strict=True))
        self.promised = dict(zip(view.ids, view.promised.tolist(), strict=True))
        assert view.costs is not None
        self.costs = {
            name: {
                field: float(getattr(view.costs, field)[at])
                for field in view.costs.__dataclass_fields__
                if isinstance(getattr(view.costs, field), np.ndarray)
            }
            for at, name in enumerate(view.ids)
        }
        self.assigned = view.assigned
        self.last_assigned = dict(zip(view.ids, view.last_assigned.tolist(), strict=True))
        self.thought = {name: one["backlog_s"] for name, one in self.costs.items()}
        if not self.late:
            for bound, least_s in zip(waiting.bound, waiting.least_s, strict=True):
                if bound in self.thought:
                    self.thought[bound] += least_s

    def order(self) -> list[int]:
        rows = list(range(len(self.waiting)))
        if self.late:
            rows.sort(
                key=lambda row: (
                    self.waiting.least_s[row] - AGING * (self.now - self.waiting.arrived[row])
                )
            )
        return rows

    def room(self, name: str) -> bool:
        info = self.machine.info_of(name)
        return self.in_flight[name] < info.max_running

    def free(self, name: str) -> bool:
        ready = self.costs[name]["backlog_s"] <= AHEAD_S + 1e-6
        return self.room(name) and (ready or not self.late)

    def pairs(self, row: int) -> dict[str, list[str]]:
        """First engines, and those that can decode after each, if that is another."""
        well = self.machine.usable(self.waiting.numbers[row])
        found: dict[str, list[str]] = {}
        for first in well:
            if first.role is Role.MIXED:
                found[first.id] = []
            elif first.role is Role.PREFILL:
                takers = []
                for second in self.machine.decoders(first, well):
                    at_once = first.protocol == "once" or self.machine.is_push(first, second)
                    promised = self.promised[second.id] < second.max_running
                    if self.room(second.id) if at_once else promised:
                        takers.append(second.id)
                if takers:
                    found[first.id] = takers
        return found

    def prefill_s(self, name: str, tokens: int, prefix: float) -> float:
        one, new = self.costs[name], max(0.0, tokens - prefix)
        pairs = new * (prefix + (new + 1.0) / 2.0)
        weights_s = max(one["floor_s"], one["token_s"] * new)
        return one["constant_s"] + weights_s + one["pair_s"] * pairs

    def fetches(self, usable: float, reached: float, fetched_s: float, computed_s: float) -> bool:
        if self.machine.POLICY == "cache-local":
            return False
        if self.machine.POLICY == "cache-global":
            return reached > usable * KVCACHE_BALANCING_THRESHOLD
        return fetched_s < computed_s

    def computes(self, name: str, tokens: int, prefix: Prefix) -> tuple[float, float]:
        """Seconds to fetch, and to compute."""
        one, last = self.costs[name], max(0, tokens - 1)
        ends = (
            prefix.usable - prefix.disk, prefix.usable, prefix.usable + prefix.peer
        )  # fmt: skip
        ahead = ("memory_bytes", "disk_bytes", "coming_bytes")
        byte_s = ("memory_byte_s", "disk_byte_s", "network_byte_s")
        have = min(prefix.usable - prefix.disk - prefix.memory, last)
        fetch_s, prefill_s = 0.0, self.prefill_s(name, tokens, have)
        for kind, end in enumerate(min(end, last) for end in ends):
            size = (end - have) * one["token_bytes"] + one[ahead[kind]]
            part_s = size * one[byte_s[kind]] + (0.0 if fetch_s else one["fetch_s"])
            rest_s = self.prefill_s(name, tokens, end)
            wanted = part_s + rest_s < prefill_s
            if kind == 2:
                gap = have < min(prefix.usable, last)
                wanted = not gap and self.fetches(have, end, part_s + rest_s, prefill_s)
            if end > have and wanted:
                fetch_s, prefill_s, have = fetch_s + part_s, rest_s, end
        return fetch_s, prefill_s

    def price(self, row: int, pairs: dict[str, list[str]]) -> dict[str, Priced]:
        tokens, matches = self.waiting.tokens[row] or 0, self.waiting.matches[row]
        output = self.waiting.outputs[row]
        busy = sum(self.thought[name] > 0 for name in pairs) / len(pairs)
        found = {}
        for first, decoders in pairs.items():
            one = self.costs[first]
            fetch_s, prefill_s = self.computes(first, tokens, matches.get(first, Prefix()))
            fetch_s = max(0.0, fetch_s - one["backlog_s"])
            queue_s, handoff_s, tbt_s, best = self.thought[first], 0.0, one["step_s"], []
            if decoders:
                computed_s = queue_s + fetch_s + prefill_s
                before_s = max(0.0, one["leaving_s"] - computed_s)
                chosen = min(
                    decoders, key=lambda d: self.decoding(None, d, tokens, output, matches)
                )
                comes_s = self.decoding(None, chosen, tokens, output, matches)[1]
                to, moved = self.costs[chosen], self.moved(chosen, tokens, matches)
                sends_s = to["handoff_factor"] * moved * one["token_bytes"]
                sends_s = to["handoff_s"] + sends_s / one["network_bytes_per_s"]
                handoff_s = max(comes_s - output * to["step_s"], sends_s + before_s)
                tbt_s = to["step_s"]
                costs = {d: self.decoding(first, d, tokens, output, matches) for d in decoders}
                least = min(costs.values())
                best = [
                    d for d, (full, seconds) in costs.items()
                    if full == least[0] and seconds <= least[1] * (1 + CLOSE)
                ]  # fmt: skip
            ttft_s = queue_s + fetch_s + prefill_s + handoff_s
            cost = ttft_s
            if self.late:
                part = min(0.9, self.overtaking(row) / len(pairs))
                cost += min(queue_s * part / (1 - part), OVERTAKEN * prefill_s)
                cost += WORK * busy**4 * prefill_s + FIRST_TOKENS * tbt_s
                late = prefill_s * (one["late_per_s"] + prefill_s * one["late_per_s2"])
                assert self.view.costs is not None
                cost += min(one["late_most"], late) * self.view.costs.usual_s
            found[first] = Priced(cost, fetch_s + prefill_s, ttft_s, best)
        return found

    def overtaking(self, row: int) -> float:
        mine = self.waiting.least_s[row]
        newest = self.machine.needs[-256:]
        if len(newest) < 8:
            return 0.0
        needed = sum(seconds for _, seconds in newest if seconds < mine)
        return needed / max(1e-3, self.now - newest[0][0])

    def moved(self, name: str, tokens: int, matches: object) -> float:
        one = matches.get(name, Prefix())  # type: ignore[attr-defined]
        return max(0.0, tokens - max(one.local, one.node))

    def decoding(
        self, first: str | None, name: str, tokens: int, output: float, matches: object
    ) -> tuple[bool, float]:
        """Whether the KV has no room; then seconds."""
        one, moved = self.costs[name], self.moved(name, tokens, matches)
        size = moved * one["token_bytes"] + one["coming_bytes"]
        comes_s = one["handoff_s"] + one["handoff_factor"] * size / one["network_bytes_per_s"]
        if first is not None:
            byte_s = self.costs[first]["token_bytes"] / self.costs[first]["network_bytes_per_s"]
            comes_s = max(comes_s, one["handoff_s"] + one["handoff_factor"] * moved * byte_s)
        return one["kv_room"] < tokens + output, comes_s + output * one["step_s"]

    def check(self, decisions: Sequence[Decision]) -> None:
        """Assert that these are right; each is carried out before the next one."""
        given = {one.request: one for one in decisions}
        shut = False
        for row in self.order():
            number = self.waiting.numbers[row]
            decision = given.pop(number, None)
            pairs = self.pairs(row) if not shut else {}
            if not self.machine.usable(number):
                assert decision is not None
                assert not isinstance(decision, Assign)
                continue
            if not isinstance(decision, Assign):
                shut |= self.holds(row, decision, pairs)
            else:
                self.assigns(row, decision, pairs)
        assert not given

    def takers(self, row: int, pairs: dict[str, list[str]]) -> set[str]:
        """Engines that a request can be given now."""
        bound = self.waiting.bound[row]
        if bound not in pairs:
            return {name for name in pairs if self.free(name)}
        if self.room(bound):
            return {bound}
        if self.now >= self.waiting.halves[row]:
            return {name for name in pairs if self.room(name)}
        return set()

    def best(self, row: int, pairs: dict[str, list[str]]) -> tuple[list[str], dict[str, Priced]]:
        """The cheapest engines; of equally cheap ones those that have room."""
        if self.waiting.bound[row] in pairs:
            takers = self.takers(row, pairs)
            pairs = {name: then for name, then in pairs.items() if name in takers}
        priced = self.price(row, pairs)
        least = min(one.cost for one in priced.values())
        best = [name for name, one in priced.items() if one.cost <= least * (1 + CLOSE)]
        return [name for name in best if self.room(name)] or best, priced

    def assigns(self, row: int, assign: Assign, pairs: dict[str, list[str]]) -> None:
        first, tokens = assign.prefill, self.waiting.tokens[row] or 0
        assert first in self.takers(row, pairs)
        best, priced = self.best(row, pairs)
        assert first in best
        one = priced[first]
        assert np.isclose(assign.ttft_s, one.ttft_s, rtol=1e-6)
        bound = self.waiting.bound[row]
        if bound in self.thought:
            self.thought[bound] -= self.waiting.least_s[row]
        self.costs[first]["backlog_s"] += one.own_s
        self.thought[first] += one.own_s
        self.in_flight[first] += 1
        if assign.plan is Plan.PAIR:
            second, to = assign.decode, self.costs[assign.decode]
            assert second in one.decoders
            mine, moved = self.costs[first], self.moved(second, tokens, self.waiting.matches[row])
            sends_s = to["handoff_factor"] * moved * mine["token_bytes"]
            mine["leaving_s"] = max(mine["leaving_s"], mine["backlog_s"])
            mine["leaving_s"] += sends_s / mine["network_bytes_per_s"]
            to["coming_bytes"] += moved * to["token_bytes"]
            to["kv_room"] -= tokens
            (self.in_flight if assign.at_once else self.promised)[second] += 1
        self.assigned += 1
        self.last_assigned |= {first: self.assigned, assign.decode: self.assigned}

    def holds(self, row: int, hold: Decision | None, pairs: dict[str, list[str]]) -> bool:
        """A request goes on waiting, or has waited too long; returns whether all later ones do."""
        takers = self.takers(row, pairs)
        if self.waiting.bound[row] in pairs:
            assert not takers
            return False
        if not pairs or (self.late and not takers):
            return True
        best, priced = self.best(row, pairs)
        assert not any(self.free(name) for name in best)
        name = hold.engine if isinstance(hold, Hold) else self.tied(best)
        assert name in best
        self.thought[name] += priced[name].own_s
        return False

    def tied(self, names: list[str]) -> str:
        """Of equally cheap engines a mixed one, then who was assigned longest ago."""
        roles = dict(zip(self.view.ids, self.view.roles, strict=True))
        mixed = [name for name in names if roles[name] is Role.MIXED]
        return min(mixed or names, key=lambda one: (self.last_assigned[one], one))


class CheckedScheduler(Scheduler):
    """Compares what it decides with the model."""

    machine: "SecondsModel"

    def schedule(self, view: View, waiting: Waiting, now: float) -> list[Decision]:
        decisions = super().schedule(view, waiting, now)
        self.machine.learn_needs(waiting)
        if len(waiting) <= ASKED_ALIKE:
            BruteForce(self.machine, view, waiting, now).check(decisions)
        return decisions


class SecondsModel(ModelOfDispatcher):
    """The same machine with a policy whose costs are in seconds."""

    POLICY = "earliest-first-token"

    def __init__(self) -> None:
        super().__init__()
        self.needs: list[tuple[float, float]] = []  # arrival and seconds of who was priced
        self.priced: set[int] = set()
        self.prefixes: dict[int, dict[str, Prefix]] = {}

    def scheduler(self) -> Scheduler:
        scheduler = CheckedScheduler(POLICIES[self.POLICY], AT_ONCE)
        scheduler.machine = self
        return scheduler

    def info_of(self, name: str) -> EngineInfo:
        engine = self.registry.get(name)
        assert engine is not None
        return engine.info

    def learn_needs(self, waiting: Waiting) -> None:
        for row, number in enumerate(waiting.numbers):
            if waiting.least_s[row] and number not in self.priced:
                self.priced.add(number)
                self.needs.append((waiting.arrived[row], waiting.least_s[row]))

    def drawn(self, data: st.DataObject, number: int) -> Request:
        tokens = data.draw(st.sampled_from(TOKENS))
        some = st.sampled_from([0, 0, tokens // 4, tokens // 2])
        names = data.draw(st.lists(st.sampled_from([one.id for one in ENGINES]), max_size=3))
        self.prefixes[number] = {}
        for name in names:
            own, memory, disk = data.draw(st.tuples(some, some, some))
            found = Prefix(
                own, memory + disk, own + memory + disk, None, data.draw(some), memory, disk
            )
            self.prefixes[number][name] = found
        return Request(number=number, model="m", arrived=self.now, tokens=tokens)

    def found(self, number: int) -> dict[str, Prefix]:
        return self.prefixes[number]

    @precondition(lambda self: self.of_stage("serves"))
    @rule(data=st.data())
    def a_request_has_its_first_token(self, data: st.DataObject) -> None:
        self.dispatcher.began(data.draw(st.sampled_from(self.of_stage("serves"))), self.now)
        self.run()

    def has_to_wait(self, number: int) -> None:
        """An engine may have room, and another one be better: the brute force decides that."""

    def comes_next(self, number: int, due: dict[int, str]) -> None:
        """The order is that of the brute force."""

    def wakes(self, deadline: float | None) -> None:
        """It looks again before the first deadline, if engines come free or half of it passed."""
        wake_at = self.dispatcher.wake_at
        assert (wake_at is None) == (deadline is None)
        assert deadline is None or wake_at <= deadline


class GlobalModel(SecondsModel):
    """Binds at arrival."""

    POLICY = "cache-global"


TestLateAndItsModel = SecondsModel.TestCase
TestLateAndItsModel.settings = settings(max_examples=400, stateful_step_count=40)
TestGlobalAndItsModel = GlobalModel.TestCase
TestGlobalAndItsModel.settings = settings(max_examples=400, stateful_step_count=40)
