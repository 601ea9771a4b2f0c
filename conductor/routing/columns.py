"""What a decision depends on, as data in columns: the engines, and the requests that wait.

Row ``i`` of each column is the same engine, or the same request. Nothing here can be asked: what
the index knows of a prompt was looked up before.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from conductor.routing.engines import Health, Role
from kvstore.index.layout import Numbers, Words

Column = npt.NDArray[np.float64]
"""A number for each engine; float64."""


class Prefix(NamedTuple):
    """How much of a prompt's KV an engine need not compute, in tokens.

    Attributes:
        local: longest prefix in the engine's own cache.
        node: longest prefix on nodes it can read from.
        usable: longest prefix of which each page is in either, or expected soon.
        rank: the engine's data-parallel rank for which this is true; None = it is for all.
        peer: how much longer than ``usable`` the prefix is that one other node of its node's
            cluster has; its node could fetch that.
    """

    local: int = 0
    node: int = 0
    usable: int = 0
    rank: int | None = None
    peer: int = 0


NO_PREFIX: Final = Prefix()
NO_KEYS: Final[Words] = np.zeros(0, dtype=np.uint64)
Matches = Mapping[str, Prefix]
"""A request's prefix at each engine, by id; absent = none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All registered engines, in columns.

    Attributes:
        ids: their names.
        models: models they serve.
        adapters: names of the LoRA adapters that they serve.
        protocols: names of the protocols by which they hand KV over.
        offers: names of the protocols that they offer over these: a pair of engines that offer the
            same one is asked by it; empty = none.
        roles: their roles.
        health: their health.
        in_flight: requests that hold a place; int64 [engines].
        promised: requests whose KV is being computed elsewhere, or waits for a place here; int64.
        max_running: places; int64, at least 1.
        last_assigned: number of the last assignment; int64, 0 = none yet.
        assigned: number of assignments so far.
        retry_after_s: ``Retry-After`` for a rejected client.
    """

    ids: Sequence[str]
    models: Sequence[str]
    adapters: Sequence[Collection[str]]
    protocols: Sequence[str]
    offers: Sequence[str]
    roles: Sequence[Role]
    health: Sequence[Health]
    in_flight: Numbers
    promised: Numbers
    max_running: Numbers
    last_assigned: Numbers
    assigned: int = 0
    retry_after_s: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Waiting requests, in columns, in order of arrival.

    Attributes:
        numbers: unique, increasing.
        models: requested models, or LoRA adapters.
        arrived: times of arrival, seconds.
        deadlines: times from which on they are rejected instead of held.
        excluded: ids of the engines at which each has already failed.
        tokens: tokens of their prompts; None = unknown.
        keys: a chain value for each leading page of their prompts, uint64; empty = unknown. Those
            of equal prefixes are equal.
        priorities: lower ones are more urgent.
        tenants: on whose behalf they are; empty = unknown.
        sessions: conversations that they belong to; empty = unknown.
        matches: how much of each prompt each engine has, as it was looked up last.
    """

    numbers: Sequence[int]
    models: Sequence[str]
    arrived: Sequence[float]
    deadlines: Sequence[float]
    excluded: Sequence[frozenset[str]]
    tokens: Sequence[int | None]
    keys: Sequence[Words]
    priorities: Sequence[int]
    tenants: Sequence[str]
    sessions: Sequence[str]
    matches: list[Matches]

    def __len__(self) -> int:
        return len(self.numbers)


class Offers(NamedTuple):
    """Engines that have room for one request, in columns.

    Attributes:
        ids: their names.
        in_flight: requests assigned to each, promised ones included.
        load: the same as a fraction of its places.
        last_assigned: number of its last assignment.
        local: prompt tokens in its own cache.
        usable: prompt tokens it need not compute.
    """

    ids: Sequence[str]
    in_flight: Column
    load: Column
    last_assigned: Column
    local: Column
    usable: Column
