"""Gives waiting requests places at engines: one pure function, called on each event.

:meth:`Scheduler.schedule` considers the waiting requests in the order of its policy, and gives each
the cheapest engine that has room: an :class:`Assign`. There may be a :class:`Reject`, or a
:class:`Hold` for a request that waits for another engine from now on; all others go on waiting.

A **first** engine prefills: a prefill engine (which needs a second one to decode), or a mixed
engine, which serves alone. A **second** engine is a decode engine, or a mixed one if no decode
engine is left. If no first or no second engine exists, the request is rejected, not held. Suspect
engines are used only if no engine is alive, dead engines never.

If a protocol asks both engines of a pair at once, both must use it, or both must prefer it to their
own: that is decided for each pair. In all other protocols the second engine gets the answer of the
first; if it cannot use that, it computes the prompt itself.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from conductor.routing.binding import AHEAD_MAX, Key, SecondsChooser, least_seconds
from conductor.routing.choices import Assign, Choice, Hold, Plan, Reject
from conductor.routing.columns import (
    NO_PREFIX,
    Column,
    Eligible,
    Matches,
    PrefixColumns,
    View,
    Waiting,
)
from conductor.routing.engines import Health, Role
from conductor.routing.explaining import Places, explained_later
from conductor.routing.groups import (
    EngineGroup,
    Kinds,
    PairRows,
    Pairs,
    grouped,
    pair_rows,
    serving,
    way,
)
from conductor.routing.moving import NO_FETCH
from conductor.routing.policy import Binding, Policy
from conductor.routing.pricing import PricedEngines, PricedPrompt
from conductor.routing.shares import in_turn

_FULL: Final = "every engine that could serve it is full"
_DECODE_FULL: Final = "every engine that could decode it is full"


_LOOKED_UP: Final = 2
"""Requests that are looked up again for each engine that becomes free."""
_IN_TURN: Final = ""
"""Stands for all protocols that ask the engines of a pair one after the other."""


class Handoff(NamedTuple):
    """How the KV of a request is handed over.

    Attributes:
        protocol: by which.
        wanted: id of the engine that was chosen to decode when the request was assigned.
    """

    protocol: str
    wanted: str


class Scheduler:
    """One policy as the function ``schedule``; stateless.

    Args:
        policy: order of requests, and costs of engines.
        at_once: protocols by which both engines of a pair are asked at once, so that a request
            takes its place at both when it is assigned.
    """

    def __init__(self, policy: Policy, at_once: Collection[str] = ()) -> None:
        self.policy = policy
        self.kinds = Kinds(frozenset(at_once), _IN_TURN)

    def due(self, view: View, waiting: Waiting, now: float) -> list[int]:
        """Rows of requests that could get a place now: their ``matches`` must be up to date.

        Of the requests that the same engines can serve, at most as many as these have free places.
        """
        if not self.policy.needs_prefixes:
            return []
        new, free, shut = self.policy.new_rows(waiting), dict[Key, int](), set[int]()
        if len(new) == len(waiting):
            return [row for row in self.order(view, waiting, now) if row in new]
        call = _Call(self, view, waiting)
        long = call.first_long(now)
        due: list[int] = []
        for row in self.order(view, waiting, now):
            if row in new:
                due.append(row)
                continue
            kind, is_long = waiting.kinds[row], long and waiting.waits_long(row, now)
            if kind in shut and not is_long:
                continue
            key = (waiting.models[row], waiting.excluded[row])
            if key not in free:
                free[key] = call.free(*key)
            if free[key] <= 0 or (call.waits_for_full(row) and not is_long):
                shut.add(kind)
                if len(shut) == len(waiting.of_kind) and not long and new <= set(due):
                    break
                continue
            free[key] -= 1
            due.append(row)
        return due

    def schedule(self, view: View, waiting: Waiting, now: float) -> list[Choice]:
        """Decide on the waiting requests.

        Args:
            view: the engines; not changed.
            waiting: the requests; not changed.
            now: time on the clock of the deadlines.

        Returns:
            Decisions in their order; none for requests that keep waiting as before. Together with
            requests that hold places they never exceed an engine's ``max_running``.
        """
        return list(_Call(self, view, waiting).decisions(now))

    def order(self, view: View, waiting: Waiting, now: float) -> Sequence[int]:
        """Rows of requests in the order in which they are considered.

        It is the policy's, but urgent priorities come first, and of each those whose tenants are
        within their fair shares.
        """
        return in_turn(self.policy.order(waiting, now), waiting, view.over)

    def receive(
        self, view: View, waiting: Waiting, handoffs: Sequence[Handoff], now: float
    ) -> dict[int, str | Hold | Reject]:
        """Choose the decode engines of the requests whose KV has arrived, in the policy's order.

        Args:
            view: the engines; not changed.
            waiting: requests whose KV has arrived; not changed.
            handoffs: how the KV of each is handed over.
            now: time on the clock of the deadlines.

        Returns:
            For each, by its row: the id of the intended engine if that has a place, and with costs
            in seconds also room for the KV; else of the cheapest that has. Where no other one has,
            the intended engine needs only a place.
        """
        call = _Call(self, view, waiting)
        rows = self.order(view, waiting, now)
        return {row: call.receive(row, handoffs[row], now) for row in rows}

    def least_s(self, view: View, waiting: Waiting, rows: Sequence[int]) -> Sequence[float]:
        """Seconds of prompts at the engine that needs the fewest, queues left out; 0 = unknown."""
        return least_seconds(self.policy, view, waiting, rows)


class _Call:
    """One call: the columns, and the assignments of this call."""

    def __init__(self, scheduler: Scheduler, view: View, waiting: Waiting) -> None:
        self._scheduler = scheduler
        self._policy = scheduler.policy
        self._view = view
        self._waiting = waiting
        self._in_flight, self._promised = view.in_flight.copy(), view.promised.copy()
        self._max_running = view.max_running
        self._room = view.in_flight < view.max_running
        self._promisable = view.promised < view.max_running
        self._last_assigned = view.last_assigned.copy()
        self._assigned = view.assigned
        self._groups: dict[Key, EngineGroup] = {}
        self._chooser: SecondsChooser | None = None
        if self._policy.fetches is not None and view.costs is not None:
            self._chooser = SecondsChooser(self._policy, view, self._room, self._least)
            self._chooser.keep(waiting)
        # Free places only get fewer during a call: later requests for the same engines are held.
        self._full: set[Key] = set()
        self._stuck: set[int] = set()  # kinds of requests whose engine is full

    def first_long(self, now: float) -> bool:
        """Whether a request waits long."""
        return bool(now >= np.array(self._waiting.halves).min(initial=math.inf))

    def decisions(self, now: float) -> Iterator[Choice]:
        """Decide on all; requests that keep waiting are left out."""
        waiting, long = self._waiting, self.first_long(now)
        done: set[int] = set()
        order = self._scheduler.order(self._view, waiting, now)
        for at, row in enumerate(order):
            kind = waiting.kinds[row]
            if kind in done and not (long and waiting.waits_long(row, now)):
                continue
            decision = self.decide(row, now, order[at + 1 : at + AHEAD_MAX])
            if not isinstance(decision, Hold) or decision.engine not in ("", waiting.bound[row]):
                yield decision
            elif kind in self._stuck or self._key(row) in self._full:
                done.add(kind)
                if len(done) == len(waiting.of_kind) and not long:
                    return

    def waits_for_full(self, row: int) -> bool:
        """Whether the engine for which a request waits has no free place."""
        bound = self._chooser.bound(self._waiting, row) if self._chooser is not None else -1
        return bound >= 0 and not self.has_room(bound)

    def free(self, model: str, excluded: frozenset[str]) -> int:
        """Free places at the first engines of a model, whatever their health."""
        ids, firsts = self._view.ids, serving(self._view, model).computing.rows
        if excluded:
            fit = [one for one in firsts.tolist() if ids[one] not in excluded]
            firsts = np.array(fit, dtype=np.intp)
        if self._chooser is not None and self._policy.binds is Binding.LATE:
            return _LOOKED_UP * int(np.isinf(self._chooser.takes(firsts)).sum())
        free = self._max_running.take(firsts) - self._in_flight.take(firsts)
        return int(np.maximum(free, 0).sum())

    def has_room(self, row: int) -> bool:
        """Whether an engine has a free place."""
        return bool(self._room[row])

    def decide(self, row: int, now: float, following: Sequence[int]) -> Choice:
        """Decide on one request; those in ``following`` rows are probably considered next."""
        waiting, key = self._waiting, self._key(row)
        if key in self._full:
            return self.hold(row, now, _FULL)
        if waiting.kinds[row] in self._stuck and not waiting.waits_long(row, now):
            return self.hold(row, now, _FULL, waiting.bound[row])
        group = self._group(row)
        if group.why_none:
            return Reject(waiting.numbers[row], group.why_none, self._view.retry_after_s)
        if self._chooser is not None:
            return self._decide_by_seconds(row, group, self._chooser, now, following)
        firsts = [one for one in group.alone if self.has_room(one)]
        for pairs in group.pairs.values():
            usable = {
                offer for offer, first in pairs.offering.items()
                if any(self._takes(one, way(self._view, first, one)) for one in pairs.decode)
            }  # fmt: skip
            preferred = self._view.preferred
            firsts += [
                one for one in pairs.prefill if preferred[one] in usable and self.has_room(one)
            ]
        if not firsts:
            self._full.add(key)
            return self.hold(row, now, _FULL)
        first = second = self.cheapest(row, firsts)
        if first not in group.alone:
            pairs = group.pairs[self._scheduler.kinds.of(self._view.protocols[first])]
            takers = [one for one in pairs.decode if self._takes(one, way(self._view, first, one))]
            second = self.cheapest(row, takers)
        return self._assign(row, first, second, group)

    def _decide_by_seconds(
        self,
        row: int,
        group: EngineGroup,
        chooser: SecondsChooser,
        now: float,
        following: Sequence[int],
    ) -> Choice:
        """Decide on one request; its engine may be one that has no room yet."""
        chosen = chooser.choose(self._waiting, row, lambda: self._possible(group), now, following)
        if chosen.full:
            self._full.add(self._key(row))
        if chosen.first < 0:
            waits_for = self._view.ids[chosen.waits_for] if chosen.waits_for >= 0 else ""
            if waits_for and waits_for == self._waiting.bound[row]:
                self._stuck.add(self._waiting.kinds[row])
            return self.hold(row, now, _FULL, waits_for)
        return self._assign(row, chosen.first, chosen.second, group, chosen.priced)

    def _possible(self, group: EngineGroup) -> tuple[Pairs, PairRows]:
        """First engines, whether they have room or not, and those that can decode after them.

        At once, these need a free place. Else requests get theirs when their KV arrives; so that
        engines prefill while others decode, as many may be promised as there are places.
        """
        takes = [
            np.where(one.at_once, self._room.take(one.rows), self._promisable.take(one.rows))
            for one in group.takers
        ]
        if all(some.all() for some in takes):
            return group.whole
        pairs: Pairs = [(group.alone, [])]
        for one, some in zip(group.takers, takes, strict=True):
            decode = one.rows[some].tolist()
            if decode:
                pairs.append((one.prefill, decode))
        return pairs, pair_rows(pairs)

    def hold(self, row: int, now: float, why: str, engine: str = "") -> Hold | Reject:
        """All engines are full, or ``engine`` has no room yet: hold or reject."""
        number = self._waiting.numbers[row]
        if now < self._waiting.deadlines[row]:
            return Hold(number, engine)
        why = f"waited too long: {why}"
        return Reject(number, why, self._view.retry_after_s, "queue_timeout")

    def receive(self, row: int, handoff: Handoff, now: float) -> str | Hold | Reject:
        """Choose the decode engine of a request whose KV has arrived, and take the place there."""
        view = self._view
        wanted = view.row_of(handoff.wanted)
        lives = wanted is not None and view.health[wanted] is not Health.DEAD
        chooser = self._chooser
        intended: int | None = None  # has a place, and no room for the KV
        if wanted is not None and lives and self.has_room(wanted):
            if chooser is None or chooser.keeps(self._waiting, row, wanted):
                return self._receive(wanted, wanted)
            intended = wanted
        pairs = self._group(row).pairs.get(self._scheduler.kinds.of(handoff.protocol))
        if pairs is None and not lives:
            why = "no engine is left to decode it"
            return Reject(self._waiting.numbers[row], why, view.retry_after_s)
        free = [one for one in pairs.decode if self.has_room(one)] if pairs is not None else []
        if chooser is not None and intended is not None:
            free = chooser.with_room(self._waiting, row, free) or [intended]
        if not free:
            return self.hold(row, now, _DECODE_FULL)
        if chooser is not None:
            return self._receive(chooser.receiver(self._waiting, row, free, wanted), wanted)
        return self._receive(self.cheapest(row, free), wanted)

    def _receive(self, chosen: int, wanted: int | None) -> str:
        self._in_flight[chosen] += 1
        self._changed(chosen)
        if wanted is not None:
            self._promised[wanted] -= 1
            self._changed(wanted)
        return self._view.ids[chosen]

    def _changed(self, row: int) -> None:
        """An engine has got a request."""
        most = self._max_running[row]
        self._room[row] = self._in_flight[row] < most
        self._promisable[row] = self._promised[row] < most

    def cheapest(self, row: int, engines: Sequence[int]) -> int:
        """The cheapest of these engines for a request."""
        if len(engines) == 1:
            return engines[0]
        ids = [self._view.ids[one] for one in engines]
        found = self._found(row)
        rows = np.array(engines, dtype=np.intp)
        requests = self._in_flight + self._promised + self._view.others
        in_flight = requests.take(rows).astype(np.float64)
        places = self._max_running.take(rows).astype(np.float64)
        eligible = Eligible(
            ids=ids,
            in_flight=in_flight,
            load=in_flight / places,
            last_assigned=self._last_assigned.take(rows).astype(np.float64),
            local=found.local.take(rows).astype(np.float64),
            usable=found.usable.take(rows),
        )
        return self._least(self._policy.costs(self._waiting, row, eligible), engines)

    def _least(self, costs: Sequence[Column], engines: Sequence[int]) -> int:
        """The engine with the least costs.

        Of equal ones, a mixed one (no handoff), then the one that was assigned longest ago.
        """
        left: npt.NDArray[np.intp] | None = None
        for column in costs:
            some = column if left is None else column[left]
            best = (some == some[some.argmin()]).nonzero()[0]
            left = best if left is None else left[best]
            if len(left) == 1:
                return engines[int(left[0])]
        equal = [engines[at] for at in (left.tolist() if left is not None else range(len(engines)))]
        roles, ids = self._view.roles, self._view.ids
        equal = [one for one in equal if roles[one] is Role.MIXED] or equal
        last = self._last_assigned.take(equal)
        oldest = np.flatnonzero(last == last.min()).tolist()
        row: int = min([equal[at] for at in oldest], key=ids.__getitem__)
        return row

    def _takes(self, row: int, way: str) -> bool:
        """Whether an engine may be assigned to decode.

        At once, it needs a free place. Else requests get theirs when their KV arrives; so that
        engines prefill while others decode, as many may be promised as there are places.
        """
        if self._scheduler.kinds.of(way) != _IN_TURN:
            return self.has_room(row)
        return bool(self._promisable[row])

    def _key(self, row: int) -> Key:
        return self._waiting.models[row], self._waiting.excluded[row]

    def _matches(self, row: int) -> Matches:
        return self._waiting.matches[row] if self._policy.needs_prefixes else {}

    def _found(self, row: int) -> PrefixColumns:
        return self._waiting.prefixes(row, self._view.ids)

    def _group(self, row: int) -> EngineGroup:
        key = self._key(row)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = grouped(self._view, *key, self._scheduler.kinds)
        return group

    def _assign(
        self,
        row: int,
        first: int,
        second: int,
        group: EngineGroup,
        priced: PricedEngines | None = None,
    ) -> Assign:
        view, matches = self._view, self._matches(row)
        candidates = explained_later(
            view,
            group,
            (first, second),
            Places(self._in_flight, self._promised, self._max_running, view.others),
            lambda way: self._scheduler.kinds.of(way) != _IN_TURN,
            self._waiting.excluded[row],
            self._found(row) if self._policy.needs_prefixes else None,
            priced,
        )
        protocol = way(view, first, second) if first != second else view.protocols[first]
        at_once = first == second or self._scheduler.kinds.of(protocol) != _IN_TURN
        self._assigned += 1
        self._in_flight[first] += 1
        if second != first:
            (self._in_flight if at_once else self._promised)[second] += 1
        for one in (first, second):
            self._last_assigned[one] = self._assigned
            self._changed(one)
        found = [matches.get(view.ids[one], NO_PREFIX) for one in (first, second)]
        usable = found[0].usable
        mine = priced.at(first) if priced else PricedPrompt(usable, NO_FETCH, 0.0, 0.0, 0.0)
        return Assign(
            request=self._waiting.numbers[row],
            prefill=view.ids[first],
            decode=view.ids[second],
            plan=Plan.ALONE if first == second else Plan.PAIR,
            protocol=protocol,
            at_once=at_once,
            reason=self._policy.because,
            usable_tokens=min(usable, mine.prefix),
            candidates=candidates,
            ranks={view.ids[first]: found[0].rank, view.ids[second]: found[1].rank},
            fetch=mine.fetch,
            fetch_s=mine.fetch_s,
            prefill_s=mine.prefill_s,
            ttft_s=mine.ttft_s,
            peer_tokens=found[0].peer if priced is None or mine.fetch.network else 0,
        )
