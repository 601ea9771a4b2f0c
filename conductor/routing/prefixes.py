"""Looks up the usable prefix of a prompt at each engine in the index. Pure.

An engine can use blocks in its own cache and pages on the node that it reads from. They are named
in different ways: an engine's own blocks by their tokens, or as pages are; pages by their prefix
keys. A prompt is hashed once for each scope: way of naming, model or space, block size, LoRA
adapter and salt.

A prefix is usable as far as each of its tokens is in a block or page that the engine can use. In
addition, its node could fetch the longest prefix that one other node of the cluster has by itself,
from the first page on, as the nodes' own directory counts it. Combinations of several nodes do not
count: a node reports to its engines what one peer has.
"""

from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from typing import Final

import msgspec
import numpy as np

from conductor.routing.columns import NO_KEYS, FoundPrefixes, Matches
from conductor.routing.engines import Engine, EngineInfo, EngineRegistry
from conductor.routing.naming import (
    Chains,
    NamedPrompt,
    PromptScope,
    lora_of,
    own_scope,
    seed_of,
    space_scope,
)
from conductor.routing.places import (
    PrefixPlan,
    RankPart,
    RankPeers,
    engine_worker,
    engine_workers,
    peer_places,
    places,
)
from kvstore.index.control import Expect, IndexReport
from kvstore.index.directory import HolderDirectory
from kvstore.index.face import PrefixIndex, PresentIndex
from kvstore.index.layout import Numbers, Words
from kvstore.index.runs import HolderRuns, PartNeed, PrefixNeeds, UsableRuns
from kvstore.index.scope import key_chains
from kvstore.index.table import IndexReader
from kvstore.protocol.page import PrefixKeys

_PLANS_MAX: Final = 256
"""Models and LoRA adapters whose engines' needs are kept."""
_NO_PAGES: Final = PrefixKeys(b"")


class MediumMatch(msgspec.Struct, frozen=True):
    """How much of a prompt one worker has in one medium.

    Attributes:
        engine: id of the engine that could use it.
        worker: the engine (a rank of it), its node, or a peer of its node.
        medium: ``GPU``, ``CPU``, ``STORAGE``, or ``EXPECTED``.
        peer: whether the worker is another node of the cluster, so that the engine's node has to
            fetch it.
        tokens: the longest usable prefix in this medium alone.
    """

    engine: str
    worker: str
    medium: str
    peer: bool
    tokens: int


def _in_medium(need: PartNeed, medium: str) -> PartNeed:
    return need._replace(holders=[one for one in need.holders if one.medium == medium])


_Row = tuple[str, str, str, bool]
"""Engine, worker, medium, and whether the worker is a peer."""
_Asked = dict[PromptScope, dict[_Row, list[PartNeed]]]
"""scope → row → requirements of a hit in this medium alone."""


def _asked(
    engines: Sequence[Engine], model: str | None, report: IndexReport, directory: HolderDirectory
) -> _Asked:
    """The lookups at each of these engines; None = for its model, without LoRA adapter."""
    workers = {one.worker: one for one in report.workers}
    asked: _Asked = {}
    for info in (engine.info for engine in engines):
        for _, name in engine_workers(info):
            served = model or info.model
            of_engine = places(info, served, name, workers, directory)
            for place in chain(of_engine, peer_places(info, served, directory)):
                for medium in {one.medium for need in place.needs for one in need.holders}:
                    row = (info.id, place.worker, medium, place.kind == "peer")
                    alone = [_in_medium(need, medium) for need in place.needs]
                    asked.setdefault(place.scope, {})[row] = alone
    return asked


def _match(
    table: IndexReader,
    scope: PromptScope,
    rows: Mapping[_Row, list[PartNeed]],
    chains: Mapping[int, Chains],
    found: Sequence[list[MediumMatch]],
) -> None:
    """Look one scope up for several prompts, by number; appends to the results of each."""
    counts = table.match(list(chains.values()), PrefixNeeds(list(rows.values())))
    for number, blocks in zip(chains, counts, strict=True):
        found[number] += [
            MediumMatch(*row, int(count) * scope.block_tokens)
            for row, count in zip(rows, blocks, strict=True)
        ]


class PrefixView:
    """Looks up prefixes for the dispatcher.

    It keeps the prompt of a request from :meth:`remember` to :meth:`forget`.

    Args:
        index: the prefix index.
        registry: the engines.
        needed: whether the policy uses prefixes at all.
    """

    def __init__(self, index: PrefixIndex, registry: EngineRegistry, *, needed: bool) -> None:
        self._index = index
        self._registry = registry
        self._prompts: dict[int, NamedPrompt] = {}
        self._expected: dict[int, dict[str, Expect]] = {}  # by request and engine
        self._plans: dict[str, PrefixPlan] = {}
        #: model → engines and report for which it is so, and how the first one names its blocks
        self._scopes: dict[str, tuple[list[Engine], IndexReport, PromptScope]] = {}
        self._secret = 0
        self.needed = needed

    def remember(self, number: int, tokens: Sequence[int], salt: str, model: str) -> None:
        """Keep a request's prompt until :meth:`forget`; ``model`` may be a LoRA adapter."""
        self._prompts[number] = NamedPrompt(np.array(tokens, dtype=np.uint32), salt, model)

    def forget(self, number: int) -> None:
        """Discard a request's prompt, if any."""
        self._prompts.pop(number, None)
        self._expected.pop(number, None)

    def keys(self, number: int, model: str) -> Words:
        """A chain value for each leading page of a request's prompt.

        Empty if nothing is known of it, or the policy does not use prefixes. As the first engine of
        the model names its own blocks, so that prompts can be compared.
        """
        prompt, present = self._prompts.get(number), self._index.present()
        engines = self._registry.of_model(model)
        if not self.needed or prompt is None or present.table is None or not engines:
            return NO_KEYS
        self._keep_secret(present.table)
        return prompt.named(self._scope_of_first(model, engines, present), self._secret)

    def _scope_of_first(
        self, model: str, engines: list[Engine], present: PresentIndex
    ) -> PromptScope:
        """How the first engine of a model names its own blocks."""
        known = self._scopes.get(model)
        if known is None or known[0] is not engines or known[1] is not present.report:
            info = engines[0].info
            worker = present.worker(engine_worker(info.id))
            known = (engines, present.report, own_scope(info, lora_of(info, model), worker))
            if len(self._scopes) >= _PLANS_MAX:
                self._scopes.clear()
            self._scopes[model] = known
        return known[2]

    def key_tokens(self, model: str) -> int:
        """Tokens of the pages that :meth:`keys` names; 0 if no engine serves the model."""
        engines = self._registry.of_model(model)
        if not engines:
            return 0
        return self._scope_of_first(model, engines, self._index.present()).block_tokens

    def find(self, number: int, model: str) -> Matches:
        """A request's prefix at each engine of the model; empty if unknown."""
        prompt = self._prompts.get(number)
        table, report = self._index.present()
        engines = self._registry.of_model(model)
        if prompt is None or table is None or not engines:
            return {}
        self._keep_secret(table)
        plan = self._plan(model, engines, report, table.holders())
        return _Lookup(table, prompt, plan).prefixes()

    def _keep_secret(self, table: IndexReader) -> None:
        """Forget chain values that another table has seeded."""
        secret = table.secret
        if secret != self._secret:
            self._secret = secret
            for prompt in self._prompts.values():
                prompt.chains.clear()

    def _plan(
        self,
        model: str,
        engines: Sequence[Engine],
        report: IndexReport,
        directory: HolderDirectory,
    ) -> PrefixPlan:
        plan = self._plans.get(model)
        if plan is None or not plan.fits(engines, report, directory):
            if plan is None and len(self._plans) >= _PLANS_MAX:
                self._plans.clear()
            plan = self._plans[model] = PrefixPlan(model, engines, report, directory)
        return plan

    def match(
        self,
        model: str,
        prompts: Sequence[Sequence[int] | PrefixKeys],
        lora: str = "",
        salt: str = "",
    ) -> list[list[MediumMatch]]:
        """The prefix of each prompt at each worker, medium by medium; empty if nothing is known.

        Args:
            model: whose engines; or a LoRA adapter.
            prompts: token ids, or prefix keys, which LoRA adapter and salt are part of already.
            lora: a LoRA adapter of ``model``; empty = as ``model`` says.
            salt: cache salt of the prompts that are token ids; empty for none.

        Returns:
            For each prompt, sorted. Of prefix keys, only what is named by them.
        """
        found: list[list[MediumMatch]] = [[] for _ in prompts]
        table, report = self._index.present()
        if table is None:
            return found
        self._keep_secret(table)
        engines = self._registry.of_model(model)
        if lora:
            engines = [one for one in engines if lora in one.info.adapters]
        named: dict[int, NamedPrompt] = {}
        keyed: dict[int, PrefixKeys] = {}
        for number, one in enumerate(prompts):
            if isinstance(one, PrefixKeys):
                keyed[number] = one
            else:
                named[number] = NamedPrompt(np.array(one, dtype=np.uint32), salt, lora or model)
        if named:
            asked = _asked(engines, lora or model, report, table.holders())
            for scope, rows in asked.items():
                chains = {number: one.named(scope, self._secret) for number, one in named.items()}
                _match(table, scope, rows, chains, found)
        if keyed:
            asked = _asked(engines, None, report, table.holders())
            for scope, rows in asked.items():
                if scope.kind == "keys":
                    seed = seed_of(scope, self._secret)
                    chains = {number: key_chains(one.packed, seed) for number, one in keyed.items()}
                    _match(table, scope, rows, chains, found)
        for matches in found:
            matches.sort(key=lambda one: (one.engine, one.worker, one.medium))
        return found

    def pages(self, number: int, info: EngineInfo) -> PrefixKeys | None:
        """The prefix keys of a request's prompt in the space of an engine; None if unknown."""
        prompt = self._prompts.get(number)
        scope = space_scope(info, lora_of(info, prompt.model)) if prompt is not None else None
        return prompt.pages(scope) if prompt is not None and scope is not None else None

    def media(self, number: int, info: EngineInfo) -> list[MediumMatch]:
        """The prefix of a request at one engine, medium by medium; empty if nothing is known."""
        prompt, engine = self._prompts.get(number), self._registry.get(info.id)
        table, report = self._index.present()
        if prompt is None or table is None or engine is None:
            return []
        self._keep_secret(table)
        found: list[MediumMatch] = []
        for scope, rows in _asked([engine], prompt.model, report, table.holders()).items():
            _match(table, scope, rows, {0: prompt.named(scope, self._secret)}, [found])
        return found

    def peer_pages(self, number: int, info: EngineInfo) -> tuple[str, PrefixKeys]:
        """The node from which an engine's own could fetch most of a request's prompt.

        Returns:
            Its name, and the keys of the leading pages that it has by itself; none if unknown.
        """
        prompt = self._prompts.get(number)
        table, _ = self._index.present()
        if prompt is None or table is None:
            return "", _NO_PAGES
        self._keep_secret(table)
        peers = list(peer_places(info, prompt.model, table.holders()))
        if not peers:
            return "", _NO_PAGES
        scope = peers[0].scope  # of all of them: they have pages of the engine's space
        chains = prompt.named(scope, self._secret)
        (counts,) = table.match([chains], PrefixNeeds([peer.needs for peer in peers]))
        best = int(counts.argmax())
        return info.peers[best], prompt.pages(scope)[: int(counts[best])]

    def expect(self, number: int, engine_id: str, rank: int, from_s: float, until_s: float) -> None:
        """An engine will probably have the blocks of a request's prompt in its own cache.

        Args:
            number: number of the request.
            engine_id: an engine that it was assigned to.
            rank: its data-parallel rank.
            from_s: time from which on it has them, on the monotonic clock.
            until_s: time at which this ends; by then its events must have told of the blocks.
        """
        prompt, present = self._prompts.get(number), self._index.present()
        engine = self._registry.get(engine_id)
        if prompt is None or present.table is None or engine is None:
            return
        self._keep_secret(present.table)
        name = engine_worker(engine_id, rank)
        lora = lora_of(engine.info, prompt.model)
        scope = own_scope(engine.info, lora, present.worker(name))
        chains = prompt.named(scope, self._secret)
        if len(chains):
            packed = chains.astype("<u8").tobytes()
            expected = Expect(name, packed, int(from_s * 1e9), int(until_s * 1e9))
            self._index.expect(expected, present.table)
            self._expected.setdefault(number, {})[engine_id] = expected

    def unexpect(self, number: int, engine_id: str) -> None:
        """An engine that was expected to have a request's prompt has failed to compute it."""
        expected = self._expected.get(number, {}).pop(engine_id, None)
        if expected is not None:
            self._index.unexpect(expected)


class _Lookup:
    """One prompt at all engines of its model."""

    def __init__(self, table: IndexReader, prompt: NamedPrompt, plan: PrefixPlan) -> None:
        self._table = table
        self._prompt = prompt
        self._plan = plan
        count = len(plan.ranks)
        self._own = np.zeros(count, dtype=np.int64)
        self._soon = np.zeros(count, dtype=np.int64)  # expected in its own cache
        self._node = np.zeros(count, dtype=np.int64)
        self._peer = np.zeros(count, dtype=np.int64)
        self._found: dict[PromptScope, HolderRuns] = {}
        self._stretches: list[tuple[RankPart, Numbers, UsableRuns]] = []
        self._torn = False  # somebody has a stretch after one that it has not
        self._leading = np.zeros(count, dtype=np.int64)  # leading tokens in blocks of one part

    def prefixes(self) -> FoundPrefixes:
        """The best rank of each engine; no rank if all have the same."""
        plan = self._plan
        for part in plan.own:
            self._add(part, self._own)
        for part in plan.on_node:
            self._add(part, self._node)
        for part in plan.expected:
            self._add(part, self._soon)
        for peers in plan.peers:
            self._add_peers(peers)
        # Without a stretch after a gap, two prefixes together are no longer than the longer one.
        covered = self._covered() if self._torn else self._leading
        usable = np.maximum(covered, np.maximum(self._own, self._node))
        peer = np.maximum(self._peer - usable, 0)
        fetched = self._fetched(usable)
        numbers = np.array((self._own, self._node, usable, peer, *fetched))
        if len(plan.ranks) == len(plan.ids):
            return FoundPrefixes(plan.ids, numbers, plan.numbered)
        numbered: list[int | None] = [*plan.numbered]
        chosen = []
        for _, ranks in groupby(enumerate(plan.ranks), key=lambda one: one[1].engine):
            rows = [row for row, _ in ranks]
            best = max(rows, key=usable.__getitem__)
            if len(rows) > 1 and usable[rows].min() == usable[best]:
                numbered[best] = None
            chosen.append(best)
        return FoundPrefixes(plan.ids, numbers[:, chosen], [numbered[row] for row in chosen])

    def _fetched(self, usable: Numbers) -> tuple[Numbers, Numbers]:
        """Of the usable tokens, those in the memory of the node, and those on its disk.

        A node's memory has no page without those before it, so what is behind the longest prefix
        there is on disk. What an engine has itself behind a gap need not be fetched.
        """
        memory = self._node.copy()
        for part in self._plan.in_memory:
            part.needs.prepare(self._plan.directory)
            found = self._find(part.scope) if part.needs.known else None
            memory[part.ranks] = (
                part.needs.prefixes(found) * part.scope.block_tokens if found is not None else 0
            )
        own = np.minimum(np.maximum(self._own, self._soon), usable)
        in_memory = np.minimum(np.maximum(memory, own), usable)
        return in_memory - own, np.maximum(np.minimum(usable, self._node) - in_memory, 0)

    def _add(self, part: RankPart, longest: Numbers) -> None:
        """Look one scope up; ``longest`` gets the tokens of the longest prefix of each rank."""
        part.needs.prepare(self._plan.directory)
        if not part.needs.known:
            return
        found = self._find(part.scope)
        if found is None:
            return
        size = part.scope.block_tokens
        runs = part.needs.prefixes_and_runs(found)
        self._raise(longest, part, runs.prefixes * size)
        self._raise(self._leading, part, runs.leading * size)
        self._torn |= runs.torn
        self._stretches.append((part, found.ends, runs))

    def _raise(self, longest: Numbers, part: RankPart, tokens: Numbers) -> None:
        if part.of_all:
            np.maximum(longest, tokens, out=longest)
        else:
            longest[part.ranks] = np.maximum(longest[part.ranks], tokens)

    def _add_peers(self, peers: RankPeers) -> None:
        """Of each rank, the longest prefix that one of its peers has by itself."""
        peers.needs.prepare(self._plan.directory)
        found = self._find(peers.scope) if peers.needs.known else None
        if found is not None:
            tokens = peers.needs.prefixes(found) * peers.scope.block_tokens
            longest = (peers.whose & tokens[:, None]).max(axis=0)
            np.maximum(self._peer, longest, out=self._peer)

    def _find(self, scope: PromptScope) -> HolderRuns | None:
        """The holders of the prompt's blocks; None if it is shorter than one."""
        found = self._found.get(scope)
        if found is None:
            chains = self._prompt.named(scope, self._table.secret)
            if not len(chains):
                return None
            found = self._found[scope] = self._table.find(chains)
        return found

    def _covered(self) -> Numbers:
        """For each rank, how many leading tokens are in one of its blocks or pages."""
        count = len(self._plan.ranks)
        every = [
            (ends * part.scope.block_tokens, part.ranks, runs.there)
            for part, ends, runs in self._stretches
        ]
        bounds = np.unique(np.concatenate([ends for ends, _, _ in every]))
        covered = np.zeros((count, len(bounds) + 1), dtype=np.bool_)
        for ends, ranks, there in every:
            # Up to its last block; what is beyond, and the last column, stays missing.
            at = np.searchsorted(ends, bounds[: np.searchsorted(bounds, ends[-1], "right")])
            if len(ranks) == count:  # these are all, in order
                covered[:, : len(at)] |= there.take(at, axis=1)
            else:
                covered[ranks, : len(at)] |= there.take(at, axis=1)
        first_missing = covered.argmin(axis=1)
        tokens: Numbers = np.concatenate(([0], bounds))[first_missing]
        return tokens
