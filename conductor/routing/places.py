"""Where to look up KV that an engine need not compute, and the requirements of a hit. Pure.

A plan is for one model, and serves all its prompts as long as engines and holders are the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np

from conductor.routing.engines import Engine, EngineInfo
from conductor.routing.naming import PromptScope, lora_of, own_scope, space_scope
from kvstore.index.apply import shard_name
from kvstore.index.control import FollowedWorker, IndexReport
from kvstore.index.directory import HolderDirectory, PageHolder
from kvstore.index.feed import EXPECTED
from kvstore.index.layout import Numbers
from kvstore.index.runs import PartNeed, PrefixNeeds

MEMORY: Final = "CPU"
"""The medium of pages in a node's memory."""


def engine_worker(engine_id: str, rank: int = 0) -> str:
    """An engine's name in the index; ranks are data-parallel ones."""
    return f"engine/{engine_id}/dp{rank}" if rank else f"engine/{engine_id}"


def node_worker(node_id: str) -> str:
    """A node's name in the index."""
    return f"node/{node_id}"


def engine_workers(info: EngineInfo) -> list[tuple[int, str]]:
    """The data-parallel ranks of an engine, and their names in the index."""
    numbers = [rank.rank for rank in info.ranks] or [0]
    return [(number, engine_worker(info.id, number)) for number in numbers]


class _Rank(NamedTuple):
    """A data-parallel rank of an engine, by the engine's position in its plan."""

    engine: int
    number: int


class _Reader(NamedTuple):
    """A holder of pages, and the requirements of its readers."""

    node: str
    shards: tuple[str, ...]
    windows: tuple[tuple[str, int], ...]


class PrefixPlace(NamedTuple):
    """Where to look up blocks or pages that one rank of an engine can use.

    Attributes:
        kind: ``own``: its own blocks; ``node``: pages of its node; ``expected``: blocks that it
            will probably have; ``peer``: pages of another node of its node's cluster.
        worker: the holder.
        scope: how they are named.
        needs: the requirements of a hit.
    """

    kind: Literal["own", "node", "expected", "peer"]
    worker: str
    scope: PromptScope
    needs: list[PartNeed]


class RankPart(NamedTuple):
    """Ranks whose blocks are named in the same way, and the requirements of each.

    Attributes:
        ranks: their rows, in the same order as the candidates.
        of_all: whether these are all ranks, in order.
    """

    scope: PromptScope
    ranks: Numbers
    needs: PrefixNeeds
    of_all: bool


class RankPeers(NamedTuple):
    """Nodes from which others of their cluster could fetch pages that are named in the same way.

    Attributes:
        needs: what a hit needs of each node's pages; a row for each node and sort of reader.
        whose: int64 [rows, ranks]: -1 (all bits) if the pages of a row can be fetched for a rank,
            else 0.
    """

    scope: PromptScope
    needs: PrefixNeeds
    whose: Numbers


class PrefixPlan:
    """The lookups for one model, for one state of its engines and of the holder directory."""

    def __init__(
        self,
        model: str,
        engines: Sequence[Engine],
        report: IndexReport,
        directory: HolderDirectory,
    ) -> None:
        workers = {one.worker: one for one in report.workers}
        self._engines = engines
        self.infos = [engine.info for engine in engines]
        self.ids = [info.id for info in self.infos]
        self.directory = directory
        self._report = report
        self._shapes = _shapes(report)
        self.ranks: list[_Rank] = []
        rows: dict[str, dict[PromptScope, list[tuple[int, list[PartNeed]]]]] = {}
        for number, info in enumerate(self.infos):
            for rank, name in engine_workers(info):
                for place in places(info, model, name, workers, directory):
                    of_scope = rows.setdefault(place.kind, {}).setdefault(place.scope, [])
                    of_scope.append((len(self.ranks), place.needs))
                    in_memory = [_in_memory(need) for need in place.needs]
                    if place.kind == "node" and in_memory != place.needs:
                        of_scope = rows.setdefault("memory", {}).setdefault(place.scope, [])
                        of_scope.append((len(self.ranks), in_memory))
                self.ranks.append(_Rank(number, rank))
        self.numbered: list[int | None] = [rank.number for rank in self.ranks]
        self.own, self.on_node, self.in_memory, self.expected = (
            _parts(rows.get(kind, {}), len(self.ranks))
            for kind in ("own", "node", "memory", "expected")
        )
        self.peers = _peers(self.infos, model, [rank.engine for rank in self.ranks], directory)

    def fits(
        self, engines: Sequence[Engine], report: IndexReport, directory: HolderDirectory
    ) -> bool:
        """Whether nothing has changed that matters."""
        if self.directory is not directory:
            return False
        if engines is not self._engines:  # of another state of the registry
            if len(engines) != len(self.infos):
                return False
            if any(one.info is not info for one, info in zip(engines, self.infos, strict=True)):
                return False
            self._engines = engines
        if report is not self._report:
            if _shapes(report) != self._shapes:
                return False
            self._report = report
        return True


def _peers(
    infos: Sequence[EngineInfo], model: str, engines: Sequence[int], directory: HolderDirectory
) -> list[RankPeers]:
    """The peers of all ranks; ``engines``: of each rank, the position of its engine.

    Engines that read the same shards have the same rows, so there are few of them.
    """
    rows: dict[PromptScope, dict[_Reader, list[PartNeed]]] = {}
    of_engine: list[tuple[PromptScope | None, set[_Reader]]] = []
    for info in infos:
        scope = space_scope(info, lora_of(info, model)) if info.peers else None
        readers: set[_Reader] = set()
        of_engine.append((scope, readers))
        if scope is None:
            continue
        of_scope = rows.setdefault(scope, {})
        windows = tuple(sorted(info.windows.items()))
        for peer in info.peers:
            reader = _Reader(peer, info.shards, windows)
            readers.add(reader)
            if reader not in of_scope:
                of_scope[reader] = _page_needs(node_worker(peer), info, directory)
    return [
        RankPeers(
            scope,
            PrefixNeeds(list(of_scope.values())),
            -np.array(
                [
                    [of_engine[one][0] == scope and row in of_engine[one][1] for one in engines]
                    for row in of_scope
                ],
                dtype=np.int64,
            ),
        )
        for scope, of_scope in rows.items()
    ]


def _parts(
    by_scope: dict[PromptScope, list[tuple[int, list[PartNeed]]]], ranks: int
) -> list[RankPart]:
    return [
        RankPart(
            scope,
            np.array([row for row, _ in rows], dtype=np.int64),
            PrefixNeeds([needs for _, needs in rows]),
            of_all=len(rows) == ranks,  # each has one place of a kind in a scope, in its order
        )
        for scope, rows in by_scope.items()
    ]


def _shapes(report: IndexReport) -> list[tuple[object, ...]]:
    return [(one.worker, one.kind, one.block_tokens, one.groups) for one in report.workers]


def _own_needs(
    name: str, workers: Mapping[str, FollowedWorker], directory: HolderDirectory
) -> list[PartNeed]:
    """The requirements of a hit in an engine's own cache: all or the last blocks of each group."""
    known = workers.get(name)
    holders = [
        one for one in directory.by_worker.get(name, ()) if one.medium != EXPECTED and not one.shard
    ]
    # The report may not know a group yet, or not know the engine.
    groups = dict.fromkeys((one.group for one in holders), 0)
    groups |= known.groups if known is not None else {}
    return [
        PartNeed([one for one in holders if one.group == group], last_blocks or None)
        for group, last_blocks in groups.items()
    ]


def _page_needs(name: str, reader: EngineInfo | None, directory: HolderDirectory) -> list[PartNeed]:
    """The requirements of a hit on a worker's pages: the reader's shards, or all if unknown."""
    shards = reader.shards if reader is not None else ()
    windows = reader.windows if reader is not None else {}
    of_shard: dict[str, list[PageHolder]] = {shard_name(0, digest): [] for digest in shards}
    last = {shard_name(0, digest): pages for digest, pages in windows.items()}
    for holder in directory.by_worker.get(name, ()):
        if holder.shard and (not shards or holder.shard in of_shard):
            of_shard.setdefault(holder.shard, []).append(holder)
    return [PartNeed(holders, last.get(shard)) for shard, holders in of_shard.items()]


def _in_memory(need: PartNeed) -> PartNeed:
    """The same from a node's memory alone."""
    return need._replace(holders=[one for one in need.holders if one.medium == MEMORY])


def places(
    info: EngineInfo,
    model: str,
    name: str,
    workers: Mapping[str, FollowedWorker],
    directory: HolderDirectory,
) -> Iterator[PrefixPlace]:
    """Where to look up pages and blocks for one rank of an engine, the worker ``name``."""
    lora = lora_of(info, model)
    scope, pages = own_scope(info, lora, workers.get(name)), space_scope(info, lora)
    yield PrefixPlace("own", name, scope, _own_needs(name, workers, directory))
    yield PrefixPlace("expected", name, scope, [PartNeed([PageHolder(name, EXPECTED, "", 0)])])
    if pages is not None:
        yield PrefixPlace("own", name, pages, _page_needs(name, None, directory))
        if info.node is not None:
            node = node_worker(info.node)
            yield PrefixPlace("node", node, pages, _page_needs(node, info, directory))


def peer_places(info: EngineInfo, model: str, directory: HolderDirectory) -> Iterator[PrefixPlace]:
    """Where to look up pages that the node of an engine could fetch."""
    pages = space_scope(info, lora_of(info, model))
    for node in map(node_worker, info.peers if pages is not None else ()):
        assert pages is not None
        yield PrefixPlace("peer", node, pages, _page_needs(node, info, directory))
