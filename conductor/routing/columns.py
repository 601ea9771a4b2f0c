"""The input of a decision in columns: the engines, and the requests that wait.

Row ``i`` of each column is the same engine, or the same request. This is plain data: the index was
queried for each prompt before.
"""

from collections.abc import Collection, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from conductor.routing.engines import Health, Role
from kvstore.index.layout import Numbers, Words

Column = npt.NDArray[np.float64]
"""A number for each engine; float64."""
Number = TypeVar("Number")


class Prefix(NamedTuple):
    """How much of a prompt's KV an engine need not compute, in tokens.

    Attributes:
        local: longest prefix in the engine's own cache.
        node: longest prefix on nodes it can read from.
        usable: longest prefix of which each page is in either, or expected soon.
        rank: the engine's data-parallel rank for which this is true; None = it is for all.
        peer: how much longer than ``usable`` the prefix is that one other node of its node's
            cluster has; its node could fetch that.
        memory: of ``usable``, the last tokens but ``disk`` that the engine does not have itself:
            its node has them in memory.
        disk: of ``usable``, the last tokens that its node has on disk only.
    """

    local: int = 0
    node: int = 0
    usable: int = 0
    rank: int | None = None
    peer: int = 0
    memory: int = 0
    disk: int = 0


NO_PREFIX: Final = Prefix()
_NUMBERS: Final = 6
"""Tokens of a :class:`Prefix`; its rank is no number."""
NO_KEYS: Final[Words] = np.zeros(0, dtype=np.uint64)
Matches = Mapping[str, Prefix]
"""A request's prefix at each engine, by id; absent = none."""


@dataclass(slots=True)
class GatheredCosts:
    """Results that :class:`conductor.routing.pricing.Prices` caches for columns of costs.

    Attributes:
        all: the columns of :class:`CostInputs`, as one array.
        of_rows: columns of the rows in an array, by the array's id, with the array, so that the id
            stays unique.
        computing: the newest prompt.
    """

    all: Any = None
    of_rows: dict[int, Any] = field(default_factory=dict)
    computing: Any = None


class CostInputs(NamedTuple, Generic[Number]):
    """What the costs of an engine depend on, but for the time: numbers, or columns of engines.

    Attributes:
        constant_s: overhead of each prompt.
        floor_s: minimum of each prompt, to read the weights.
        token_s: seconds of each computed token.
        pair_s: seconds of each pair of a computed token and an earlier one.
        step_s: seconds of a decode step, with one more request than the engine has.
        kv_room: tokens of KV for which it has room in addition to its decoding requests; infinite =
            unknown.
        token_bytes: bytes of one token's KV.
        network_bytes_per_s: bytes a second of the engine's links to others, by their datasheets.
        handoff_s: seconds of each handoff to it, in addition to its bytes.
        handoff_factor: how many times longer handoffs take than the slower link's datasheet says.
        coming_bytes: KV on its way to it over the network, or that will be.
        fetch_s: seconds of each fetch to it, in addition to its bytes.
        memory_byte_s, disk_byte_s, network_byte_s: seconds of a byte that it fetches from the
            memory or the disk of its node, or from another node.
        memory_bytes, disk_bytes: KV on its way to it from the memory and the disk.
        others_s: seconds until the prompts of others that wait at an engine are computed. Requests
            do not wait for these here, because nobody reports when that is.
        late_per_s, late_per_s2, late_most: number of requests decoding there that become late if it
            computes a prompt: per second of that, per second squared, and the maximum.
    """

    constant_s: Number
    floor_s: Number
    token_s: Number
    pair_s: Number
    step_s: Number
    kv_room: Number
    token_bytes: Number
    network_bytes_per_s: Number
    handoff_s: Number
    handoff_factor: Number
    coming_bytes: Number
    fetch_s: Number
    memory_byte_s: Number
    disk_byte_s: Number
    network_byte_s: Number
    memory_bytes: Number
    disk_bytes: Number
    others_s: Number
    late_per_s: Number
    late_per_s2: Number
    late_most: Number


class StepColumns(NamedTuple):
    """The last step with prompts of each engine; all float64 [engines], 0 = it has begun.

    Attributes:
        seconds: that it takes.
        tokens: that it computes.
        prompts: of which it computes some.
    """

    seconds: Column
    tokens: Column
    prompts: Column


@dataclass(frozen=True, slots=True, kw_only=True)
class CostColumns:
    """What the engines' costs depend on now, in columns; all float64 [engines].

    Attributes:
        backlog_s: seconds until the prompts that an engine has are computed.
        steps: the last step of each.
        leaving_s: seconds until the KV of these and earlier prompts has been sent to other engines.
        inputs: the rest.
        usual_s: recent mean seconds to the first token; one number.
        kept: cached results.
    """

    backlog_s: Column
    steps: StepColumns
    leaving_s: Column
    inputs: CostInputs[Column]
    usual_s: float = 0.0
    kept: GatheredCosts = field(default_factory=GatheredCosts, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All registered engines, in columns.

    Attributes:
        ids: names of the engines.
        models: models they serve.
        adapters: names of the LoRA adapters that they serve.
        protocols: names of the protocols by which they hand KV over.
        preferred: names of the protocols that they offer over these: a pair of engines that prefer
            the same one is asked by it; empty = none.
        roles: what they do now.
        lent: names of the mixed engines that do something else now.
        health: their health.
        in_flight: requests that hold a place; int64 [engines].
        promised: requests whose KV is being computed elsewhere, or waits for a place here; int64.
        max_running: places; int64, at least 1.
        others: requests of others; int64. They load an engine, and take no places of ours.
        last_assigned: number of the last assignment; int64, 0 = none yet.
        assigned: number of assignments so far.
        retry_after_s: ``Retry-After`` for a rejected client.
        costs: what costs depend on; None if nobody uses any.
        over: tenants that got more than their fair share, and how far, from 1 on: they wait behind
            others.
        kept: what was found out of ids, models, adapters, protocols, preferred ones and roles, by
            model; and ``rows``, of ids. Views that have these in common share both.
        kept_groups: what was found out of the inputs of ``kept`` and of health.
    """

    ids: Sequence[str]
    models: Sequence[str]
    adapters: Sequence[Collection[str]]
    protocols: Sequence[str]
    preferred: Sequence[str]
    roles: Sequence[Role]
    health: Sequence[Health]
    in_flight: Numbers
    promised: Numbers
    max_running: Numbers
    last_assigned: Numbers
    others: Numbers = field(default_factory=lambda: np.zeros((), dtype=np.int64))
    assigned: int = 0
    retry_after_s: int = 1
    costs: CostColumns | None = None
    over: Mapping[str, int] = field(default_factory=dict)
    lent: Collection[str] = frozenset()
    kept: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    rows: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    kept_groups: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def row_of(self, engine_id: str) -> int | None:
        """The row of an engine; None if it is not there."""
        if len(self.rows) != len(self.ids):
            self.rows.update((name, row) for row, name in enumerate(self.ids))
        return self.rows.get(engine_id)


class FoundPrefixes(Mapping[str, Prefix]):
    """How much of a prompt each engine has, as columns; read by few as values.

    Attributes:
        ids: of the engines; not to be changed.
        numbers: int64 [6, engines]: local, node, usable, peer, memory and disk tokens.
    """

    __slots__ = ("_ranks", "ids", "numbers")

    def __init__(self, ids: Sequence[str], numbers: Numbers, ranks: Sequence[int | None]) -> None:
        self.ids = ids
        self.numbers = numbers
        self._ranks = ranks

    def __getitem__(self, engine_id: str) -> Prefix:
        """The prefix at an engine."""
        try:
            at = self.ids.index(engine_id)
        except ValueError:
            raise KeyError(engine_id) from None
        local, node, usable, *others = self.numbers[:, at].tolist()
        return Prefix(local, node, usable, self._ranks[at], *others)

    def __iter__(self) -> Iterator[str]:
        return iter(self.ids)

    def __len__(self) -> int:
        return len(self.ids)


class PrefixColumns(NamedTuple):
    """How much of one prompt each engine of a view has, in columns of tokens.

    Attributes:
        ids: names of the engines.
        matches: matches of which these columns are made.
        numbers: int64 [6, engines]: local, node, usable, peer, memory and disk tokens.
        usable: of these, the usable ones, float64.
        peer: likewise.
        held: those that each has now, in its own cache or at its node, float64.
        at_node: those in the memory and on the disk of an engine's node, float64 [2, engines]; None
            = none are.
    """

    ids: Sequence[str]
    matches: Matches
    numbers: Numbers
    usable: Column
    peer: Column
    held: Column
    at_node: Column | None

    @property
    def local(self) -> Numbers:
        """Tokens in each engine's own cache; int64."""
        local: Numbers = self.numbers[0]
        return local


def prefix_columns(matches: Matches, ids: Sequence[str]) -> PrefixColumns:
    """The prefixes of one prompt at these engines."""
    numbers = np.zeros((_NUMBERS, len(ids)), dtype=np.int64)
    if isinstance(matches, FoundPrefixes):
        if matches.ids == ids:
            numbers = matches.numbers
        else:
            rows = {name: row for row, name in enumerate(matches.ids)}
            there = [row for row, name in enumerate(ids) if name in rows]
            numbers[:, there] = matches.numbers[:, [rows[ids[row]] for row in there]]
    elif matches:
        found = [matches.get(one, NO_PREFIX) for one in ids]
        numbers[:] = np.array(
            [
                (one.local, one.node, one.usable, one.peer, one.memory, one.disk)
                for one in found
            ]
        ).T  # fmt: skip
    usable, peer = numbers[2:4].astype(np.float64)
    at_node = numbers[4:].astype(np.float64) if numbers[4:].any() else None
    held = np.maximum(numbers[0], numbers[1]).astype(np.float64)
    return PrefixColumns(ids, matches, numbers, usable, peer, held, at_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Waiting requests, in columns, in order of arrival.

    Attributes:
        numbers: unique, increasing.
        models: requested models, or LoRA adapters.
        arrived: times of arrival, seconds.
        deadlines: times from which on they are rejected instead of held.
        halves: times at which half of the time until then has passed.
        excluded: ids of the engines at which each has already failed.
        tokens: tokens of their prompts; None = unknown.
        keys: a chain value for each leading page of their prompts, uint64; empty = unknown. Those
            of equal prefixes are equal.
        priorities: lower ones are more urgent.
        tenants: on whose behalf they are; empty = unknown.
        sessions: conversations that they belong to; empty = unknown.
        matches: how much of each prompt each engine has, as it was looked up last.
        least_s: seconds of each prompt at the engine for which it waits, else at the engine that
            needs the fewest, queues left out, as of then; 0 = unknown.
        bound: the engine for which each waits if it has been chosen already; else empty.
        kinds: equal for those of one model that have failed at the same engines, and wait for the
            same one.
        of_kind: how many there are of each kind.
        outputs: tokens that each answer is expected to have.
        found: what :meth:`prefixes` has said of each; None = nothing yet.
    """

    numbers: Sequence[int]
    models: Sequence[str]
    arrived: Sequence[float]
    deadlines: Sequence[float]
    halves: Sequence[float]
    excluded: Sequence[frozenset[str]]
    tokens: Sequence[int | None]
    keys: Sequence[Words]
    priorities: Sequence[int]
    tenants: Sequence[str]
    sessions: Sequence[str]
    matches: list[Matches]
    least_s: MutableSequence[float]
    bound: list[str]
    outputs: Sequence[float]
    found: list[PrefixColumns | None]
    kinds: Sequence[int]
    of_kind: Mapping[int, int]

    def __len__(self) -> int:
        return len(self.numbers)

    def waits_long(self, row: int, now: float) -> bool:
        """Whether half of the time until the deadline of a request has passed."""
        return now >= self.halves[row]

    def prefixes(self, row: int, ids: Sequence[str]) -> PrefixColumns:
        """The prefixes of one prompt at these engines; kept until it is looked up again."""
        known = self.found[row]
        if known is None or known.ids is not ids or known.matches is not self.matches[row]:
            known = self.found[row] = prefix_columns(self.matches[row], ids)
        return known


class Terms(NamedTuple):
    """The estimated times of engines for one request, in columns of seconds.

    Attributes:
        queue_s: until the requests before it are computed.
        fetch_s: to fetch the part of its prompt that another node has; 0 if that is not done.
        prefill_s: to compute the rest of its prompt.
        handoff_s: until the rest of its KV is where its tokens are generated.
        tbt_s: between two of its tokens.
        late_s: for requests that decode at the engine and become late because it computes the rest
            of the prompt; each of them counts as much as a usual first token takes.
    """

    queue_s: Column
    fetch_s: Column
    prefill_s: Column
    handoff_s: Column
    tbt_s: Column
    late_s: Column

    @property
    def ttft_s(self) -> Column:
        """Until its first token."""
        return self.queue_s + self.fetch_s + self.prefill_s + self.handoff_s


class Eligible(NamedTuple):
    """Engines that one request could go to, in columns.

    With costs in seconds there are only ``terms``; without, those that are full are left out.

    Attributes:
        ids: their names.
        in_flight: requests assigned to each, promised ones and those of others included.
        load: the same as a fraction of its places.
        last_assigned: number of its last assignment.
        local: prompt tokens in its own cache.
        usable: prompt tokens it need not compute.
        terms: seconds; None if the policy does not use costs.
    """

    ids: Sequence[str]
    in_flight: Column
    load: Column
    last_assigned: Column
    local: Column
    usable: Column
    terms: Terms | None = None
