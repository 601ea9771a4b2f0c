"""The part of a decision that shows each engine that serves the model. Pure."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from conductor.routing.choices import VERDICTS, Candidates
from conductor.routing.columns import PrefixColumns, View
from conductor.routing.engines import Health
from conductor.routing.groups import EngineGroup, ServingEngines
from conductor.routing.pricing import PricedEngines
from kvstore.index.layout import Flags, Numbers

_PASSED, _FULL, _FAILED, _SUSPECT, _DEAD, _PREFILLS, _DECODES, _ALONE = range(len(VERDICTS))


class Places(NamedTuple):
    """The places of all engines of a view, before an assignment.

    Attributes:
        in_flight: requests that have one.
        promised: requests that will need one.
        max_running: how many there are.
        others: requests of others, which need none.
    """

    in_flight: Numbers
    promised: Numbers
    max_running: Numbers
    others: Numbers


def explained_later(
    view: View,
    group: EngineGroup,
    pair: tuple[int, int],
    places: Places,
    at_once: Callable[[str], bool],
    excluded: frozenset[str],
    found: PrefixColumns | None,
    priced: PricedEngines | None,
) -> Candidates:
    """Like :func:`explained`, computed on the first access."""
    offer = view.preferred[pair[0]]
    in_flight, promised, most, others = places
    copies = Places(in_flight.copy(), promised.copy(), most, np.broadcast_to(others, most.shape))
    numbers = found.numbers if found is not None else None
    return Candidates.later(
        lambda: explained(group, pair, copies, offer, at_once, excluded, numbers, priced)
    )


def explained(
    group: EngineGroup,
    pair: tuple[int, int],
    places: Places,
    offer: str,
    at_once: Callable[[str], bool],
    excluded: frozenset[str],
    found: Numbers | None,
    priced: PricedEngines | None,
) -> Candidates:
    """The numbers of all engines that serve the model.

    Args:
        group: those that serve the model.
        pair: rows of the engines that were chosen; equal if one serves alone.
        places: of all engines.
        offer: protocol that the first one of the pair offers over its own; empty = none.
        at_once: whether a protocol asks both engines of a pair at once.
        excluded: ids of the engines that have failed the request.
        found: int64 [6, all engines]: its prefixes; None = the policy does not use them.
        priced: its seconds, likewise.
    """
    serving, health = group.serving, group.health
    rows = serving.rows
    in_flight, promised, most, others = (one.take(serving.at) for one in places)
    numbers = np.zeros((9, len(rows)), dtype=np.int32)
    numbers[0] = in_flight + promised
    numbers[1] = most
    if found is not None:
        numbers[2:8] = found.take(serving.at, axis=1)
    numbers[8] = others
    room, takes = in_flight < most, promised < most
    takes = np.where(_asked_at_once(serving, offer, at_once), room, takes)
    verdicts = np.where(np.where(serving.decodes, takes, room), _PASSED, _FULL).astype(np.uint8)
    if health.count(Health.ALIVE) < len(health):
        for at, state in enumerate(health):
            if state is not Health.ALIVE:
                verdicts[at] = _SUSPECT if state is Health.SUSPECT else _DEAD
    for at in [at for at, one in enumerate(serving.ids) if one in excluded] if excluded else ():
        verdicts[at] = _FAILED
    first, second = rows.index(pair[0]), rows.index(pair[1])
    verdicts[first], verdicts[second] = _PREFILLS, _DECODES
    if first == second:
        verdicts[first] = _ALONE
    return Candidates(
        serving.ids,
        serving.roles,
        health,
        numbers,
        verdicts,
        priced.shown(serving.at) if priced is not None else None,
    )


def _asked_at_once(serving: ServingEngines, offer: str, at_once: Callable[[str], bool]) -> Flags:
    """Whether each engine would be asked at once with this first one."""
    result: Flags = np.zeros(len(serving.rows), dtype=np.bool_)
    for protocol, those in serving.of_protocol.items():
        if at_once(protocol):
            result |= those
    if offer:
        result = np.where(serving.of_offer[offer], at_once(offer), result)
    return result
