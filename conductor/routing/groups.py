"""Which engines serve a model, which of them can do so now, and why none can. Pure."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from conductor.routing.columns import View
from conductor.routing.engines import Health, Role
from kvstore.index.layout import Flags

_KEPT_MAX: Final = 1_024
"""Models and LoRA adapters whose engines are kept; a client may ask for any name."""


Rows = npt.NDArray[np.intp]
"""Rows of engines in the view."""
Pairs = list[tuple[list[int], list[int]]]
"""Rows of engines that can be first, and of those that can decode after them (none = they do)."""


class PairRows(NamedTuple):
    """The same as arrays.

    Attributes:
        firsts: all that can be first, those of each pair together.
        rows: these.
        at: the position of each.
        parts: of each pair: which of the firsts, and those that can decode after them, if any.
    """

    firsts: list[int]
    rows: Rows
    at: dict[int, int]
    parts: list[tuple[slice, Rows]]


def pair_rows(pairs: Pairs) -> PairRows:
    """Pairs as arrays."""
    firsts, parts = list[int](), []
    for some, seconds in pairs:
        mine = slice(len(firsts), len(firsts) + len(some))
        firsts += some
        if some and seconds:
            parts.append((mine, np.array(seconds, dtype=np.intp)))
    at = {row: position for position, row in enumerate(firsts)}
    return PairRows(firsts, np.array(firsts, dtype=np.intp), at, parts)


class ServingEngines(NamedTuple):
    """The engines of one model, whatever their health.

    Attributes:
        rows: in the view.
        at: the same as an array.
        ids: their names.
        roles: their roles.
        firsts: rows of those that can compute prompts.
        computing: the same, without engines that decode after them.
        decodes: whether each only decodes.
        of_protocol: whether each uses this protocol, by protocol.
        of_offer: whether each prefers it to its own; only offered protocols.
    """

    rows: list[int]
    at: npt.NDArray[np.intp]
    ids: tuple[str, ...]
    roles: tuple[Role, ...]
    firsts: list[int]
    computing: PairRows
    decodes: Flags
    of_protocol: dict[str, Flags]
    of_offer: dict[str, Flags]


class EnginePairs(NamedTuple):
    """Rows of engines that can serve in pairs.

    Attributes:
        prefill: rows of engines that prefill.
        decode: rows of engines that decode.
        offering: one of the former for each protocol that they offer over their own.
    """

    prefill: list[int]
    decode: list[int]
    offering: dict[str, int]


class Takers(NamedTuple):
    """Engines that prefill and offer the same protocol, and those that could decode after them.

    Attributes:
        prefill: the former.
        decode: the latter, whether they have room or not.
        rows: their rows.
        at_once: whether each would be asked at the same time as the former.
    """

    prefill: list[int]
    decode: list[int]
    rows: Rows
    at_once: Flags


class EngineGroup(NamedTuple):
    """The engines for requests of one model that have failed at the same engines, as rows.

    Attributes:
        serving: all that serve the model.
        health: health of the engines that serve the model.
        alone: engines that can serve alone; without pairs or mixed engines at home, the engines
            that are lent.
        pairs: for each protocol that asks both at once, and for all others together.
        takers: the same for each protocol that those who prefill offer.
        whole: all pairs of these, if all engines accept requests; and as arrays.
        why_none: why no engine can serve; empty if some can.
    """

    serving: ServingEngines
    health: tuple[Health, ...]
    alone: list[int]
    pairs: dict[str, EnginePairs]
    takers: list[Takers]
    whole: tuple[Pairs, PairRows]
    why_none: str


def serving(view: View, model: str) -> ServingEngines:
    """The engines of a model; or of a LoRA adapter, if no model has its name."""
    kept: dict[str, ServingEngines] = view.kept
    found = kept.get(model)
    if found is None:
        rows = [row for row, served in enumerate(view.models) if served == model]
        rows = rows or [row for row, names in enumerate(view.adapters) if model in names]
        firsts = [row for row in rows if view.roles[row] is not Role.DECODE]
        found = ServingEngines(
            rows,
            np.array(rows, dtype=np.intp),
            tuple(view.ids[row] for row in rows),
            tuple(view.roles[row] for row in rows),
            firsts,
            pair_rows([(firsts, [])]),
            np.array([view.roles[row] is Role.DECODE for row in rows], dtype=np.bool_),
            _flags([view.protocols[row] for row in rows]),
            _flags([view.preferred[row] for row in rows]),
        )
        if len(kept) >= _KEPT_MAX:
            kept.clear()
        kept[model] = found
    return found


def _flags(names: Sequence[str]) -> dict[str, Flags]:
    every = dict.fromkeys(names)
    return {one: np.array([one == name for name in names], dtype=np.bool_) for one in every}


class Kinds(NamedTuple):
    """By which protocols both engines of a pair are asked at once.

    Attributes:
        at_once: protocols that ask both engines at once.
        in_turn: stands for all other protocols.
    """

    at_once: frozenset[str]
    in_turn: str

    def of(self, protocol: str) -> str:
        """The protocol if it asks both engines of a pair at once; else a name for all others.

        Engines whose protocols are of one kind can be paired.
        """
        return protocol if protocol in self.at_once else self.in_turn


def grouped(view: View, model: str, excluded: frozenset[str], kinds: Kinds) -> EngineGroup:
    """The engines that can serve; suspect ones are used only if no healthy one can.

    Args:
        view: all engines.
        model: of the request.
        excluded: ids of the engines that have failed it.
        kinds: of protocols.
    """
    kept: dict[object, tuple[Sequence[Health], EngineGroup]] = view.kept_groups
    key = (model, excluded, kinds)
    known = kept.get(key)
    if known is not None and (known[0] is view.health or known[0] == view.health):
        return known[1]
    group = _grouped(view, model, excluded, kinds)
    if len(kept) >= _KEPT_MAX:
        kept.clear()
    kept[key] = (view.health, group)
    return group


def _grouped(view: View, model: str, excluded: frozenset[str], kinds: Kinds) -> EngineGroup:
    every = serving(view, model)
    health = tuple([view.health[row] for row in every.rows])
    fit = [row for row in every.rows if view.ids[row] not in excluded]
    for bad in ({Health.SUSPECT, Health.DEAD}, {Health.DEAD}):
        well = [row for row in fit if view.health[row] not in bad]
        alone = [row for row in well if view.roles[row] is Role.MIXED]
        of_kind = {row: kinds.of(view.protocols[row]) for row in well}
        pairs = {
            one: _pairs(view, [row for row in well if of_kind[row] == one])
            for one in dict.fromkeys(of_kind.values())
        }
        pairs = {one: those for one, those in pairs.items() if those.decode}
        if alone or any(one.prefill for one in pairs.values()):
            takers = [one for those in pairs.values() for one in _takers(view, those, kinds)]
            whole: Pairs = [(alone, []), *((one.prefill, one.decode) for one in takers)]
            return EngineGroup(
                every, health, alone, pairs, takers, (whole, pair_rows(whole)), ""
            )  # fmt: skip
    for bad in ({Health.SUSPECT, Health.DEAD}, {Health.DEAD}):
        # The partners of those that are lent have failed this request, or cannot take it.
        alone = [row for row in fit if view.ids[row] in view.lent and view.health[row] not in bad]
        if alone:
            whole = [(alone, [])]
            return EngineGroup(every, health, alone, {}, [], (whole, pair_rows(whole)), "")
    why = why_nobody(view, fit, len(excluded))
    return EngineGroup(every, health, [], pairs, [], ([], pair_rows([])), why)


def way(view: View, first: int, second: int) -> str:
    """The protocol by which a pair is asked."""
    offer = view.preferred[first]
    return offer if offer and offer == view.preferred[second] else view.protocols[first]


def _takers(view: View, pairs: EnginePairs, kinds: Kinds) -> list[Takers]:
    return [
        Takers(
            [one for one in pairs.prefill if view.preferred[one] == offer],
            pairs.decode,
            np.array(pairs.decode, dtype=np.intp),
            np.array(
                [kinds.of(way(view, example, one)) != kinds.in_turn for one in pairs.decode],
                dtype=np.bool_,
            ),
        )
        for offer, example in pairs.offering.items()
    ]


def _pairs(view: View, rows: Sequence[int]) -> EnginePairs:
    by_role: dict[Role, list[int]] = {role: [] for role in Role}
    for row in rows:
        by_role[view.roles[row]].append(row)
    decode = by_role[Role.DECODE] or by_role[Role.MIXED]
    prefill = by_role[Role.PREFILL]
    return EnginePairs(prefill, decode, {view.preferred[one]: one for one in prefill})


def why_nobody(view: View, fit: Sequence[int], excluded: int) -> str:
    """Why no engine can serve.

    Args:
        view: all engines.
        fit: rows of the model's engines that have not failed the request.
        excluded: number of the model's engines that have failed it.
    """
    left = [row for row in fit if view.health[row] is not Health.DEAD]
    roles = {view.roles[row] for row in left}
    if roles == {Role.PREFILL}:
        return "only prefill engines are left"
    if roles == {Role.DECODE}:
        return "only decode engines are left"
    if roles:
        names = ", ".join(sorted({view.protocols[row] for row in left}))
        return f"no prefill and decode engine are left that speak the same protocol: {names}"
    failed = f"; {excluded} failed this request" if excluded else ""
    return f"no engine is left for this model{failed}"
