"""Goal: of whatever records a start finds, all pages that can be reached are there, and no others.

The model knows single pages in dicts, and nothing of runs: which page is before each one, and where
its record lies. Records lie in any order. Some name other pages before them than other records of
the same page do, or each other; some are of a shard that the node cannot hold.
"""

from typing import NamedTuple

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.protocol.page import ALL_KEYS, PrefixKey, ShardSpec, SpaceIdentity
from kvstore.state.table.adopt import FoundSegment, adopt
from kvstore.state.table.invariants import check
from kvstore.state.tree import node as nodes
from kvstore.state.tree.places import Place
from kvstore.state.tree.prefix_tree import PrefixTree
from tests.state.disk.disk_world import DiskWorld
from tests.state.world import FULL, FULL_2, WINDOW, identity, key

RECORD_BYTES = 8192
SMALL_WINDOW = msgspec.structs.replace(WINDOW, layout=FULL.layout)
"""Its records are as large as the others'."""
SHARDS = [FULL, FULL_2, SMALL_WINDOW]
REFUSED = msgspec.structs.replace(SMALL_WINDOW, window_pages=3)
"""Another window for the same group: no node can hold both."""
MODELS = (identity(), identity(model="other"))
PAIRS: list[tuple[SpaceIdentity, ShardSpec]] = [
    *((of, shard) for of in MODELS for shard in SHARDS),
    (identity(), REFUSED),
]
OF_NO_SHARD = len(PAIRS) - 1
ZEROS = "0"
"""The page under the key that stands for all: no start takes it over."""
Page = tuple[int, str, int]
"""Space, name, shard."""
Known = tuple[Place, bytes, str, int]
"""Where a page is, its digest, the page before it, its depth."""


class Record(NamedTuple):
    """A record of a page, which says that the page is behind another one."""

    name: str
    before: str
    pair: int


class Drawn(NamedTuple):
    """What a start finds; ``alike``: the first 8 bytes of all keys are equal."""

    segments: list[list[Record]]
    run_pages: int
    alike: bool

    def key(self, name: str) -> PrefixKey:
        """The key of a page, and of none."""
        if name in ("", ZEROS):
            return PrefixKey(ALL_KEYS)
        return PrefixKey(bytes(8) + key(name)[8:]) if self.alike else key(name)


class Model:
    """The pages of these records, one by one.

    Attributes:
        before: the page that the first record of a page names.
        records: what is taken over, if it can be reached, in the order of the segments.
        refused: there are records of a shard that the node cannot hold.
    """

    def __init__(self, segments: list[list[Record]]) -> None:
        self.before: dict[tuple[int, str], str] = {}
        self.records: dict[Page, tuple[int, int]] = {}
        self.refused = any(one.pair == OF_NO_SHARD for every in segments for one in every)
        for number, every in enumerate(segments, 1):
            for at, one in enumerate(every):
                if one.pair == OF_NO_SHARD or one.name == ZEROS:
                    continue
                space, shard = divmod(one.pair, len(SHARDS))
                before = "" if one.before == ZEROS else one.before
                if self.before.setdefault((space, one.name), before) == before:
                    self.records[space, one.name, shard] = number, at

    def chain(self, space: int, name: str) -> list[str] | None:
        """The pages up to this one, the last one first; None if they precede each other."""
        found: list[str] = []
        while name:
            if name in found:
                return None
            found.append(name)
            name = self.before.get((space, name), "")
        return found

    def stands(self, page: Page) -> bool:
        """Whether a page can be reached."""
        space, name, shard = page
        chain = self.chain(space, name)
        if chain is None:
            return False
        return SHARDS[shard] is SMALL_WINDOW or all(
            (space, one, shard) in self.records for one in chain
        )


def placed(drawn: Drawn) -> list[FoundSegment]:
    """The segments, as a start tells them."""
    return [
        FoundSegment(
            number, 1 << 20, True, len(every) * RECORD_BYTES, len(every),
            b"".join(drawn.key(one.name) for one in every),
            b"".join(drawn.key(one.before) for one in every),
            b"".join(digest(number, at) for at in range(len(every))),
            np.arange(len(every), dtype=np.uint64) * RECORD_BYTES,
            np.array([one.pair for one in every], np.uint16),
        )
        for number, every in enumerate(drawn.segments, 1)
    ]  # fmt: skip


def digest(segment: int, at: int) -> bytes:
    return (segment << 32 | at).to_bytes(16, "big")


NAMES = st.text("ab", min_size=1, max_size=5)
OTHERS = st.one_of(NAMES, st.sampled_from(["", "x", ZEROS]))


@st.composite
def starts(draw: st.DrawFn) -> Drawn:
    """Prompts of some shards, most of them whole; then some records say something else."""
    prompts = draw(st.lists(NAMES, min_size=1, max_size=8))
    pages = dict.fromkeys(
        (path[:end], pair)
        for path in prompts
        for pair in draw(st.lists(st.integers(0, OF_NO_SHARD), min_size=1, max_size=3))
        for end in range(draw(st.sampled_from([1, 1, 1, 2, 3])), len(path) + 1)
    )
    forged = draw(st.dictionaries(NAMES, OTHERS, max_size=draw(st.sampled_from([0, 0, 3]))))
    records = [Record(name, forged.get(name, name[:-1]), pair) for name, pair in pages]
    for at in draw(st.lists(st.integers(0, len(records)), max_size=draw(st.integers(0, 2)))):
        if at < len(records):
            records[at] = records[at]._replace(before=draw(OTHERS))
    if draw(st.integers(0, 9)) == 9:
        records.insert(draw(st.integers(0, len(records))), Record(ZEROS, "", 0))
    match draw(st.sampled_from(["as they came", "reversed", "any"])):
        case "reversed":
            records.reverse()
        case "any":
            records = draw(st.permutations(records))
    first, second = sorted(draw(st.tuples(*[st.integers(0, len(records))] * 2)))
    segments = [records[:first], records[first:second], records[second:]]
    return Drawn(segments, draw(st.sampled_from([1, 2, 3, 128])), draw(st.booleans()))


def started(drawn: Drawn) -> tuple[DiskWorld, list[PrefixTree], int]:
    """A table that has taken the segments over, its spaces, and how many pages it says it has."""
    world, before = DiskWorld(), nodes.RUN_PAGES_MAX
    spaces = [world.table.spaces.open(world.me.session, of, SHARDS)[0] for of in MODELS]
    nodes.RUN_PAGES_MAX = drawn.run_pages
    try:
        pages = adopt(world.table, placed(drawn), PAIRS, len(drawn.segments) + 1)
    finally:
        nodes.RUN_PAGES_MAX = before
    check(world.table)
    return world, spaces, pages


def found(spaces: list[PrefixTree], name_of: dict[bytes, str]) -> dict[Page, Known]:
    """All pages of the table; no node is split for that."""
    return {
        (at, name_of[one], shard): (
            node.place_at(shard, position), node.digest_at(shard, position),
            name_of[node.key_before(position) or b""], node.first_depth + position,
        )
        for at, space in enumerate(spaces)
        for node in set(space.index.values())
        for position, one in enumerate(node.key_list())
        for shard in node.place_columns
    }  # fmt: skip


@given(drawn=starts())
@settings(max_examples=8 * settings.default.max_examples, deadline=None)
def test_a_start_finds_all_that_single_pages_lead_to_and_nothing_else(drawn: Drawn):
    model = Model(drawn.segments)
    standing = {page: at for page, at in model.records.items() if model.stands(page)}

    world, spaces, pages = started(drawn)

    names = {name for _, name in model.before} | set(model.before.values())
    name_of: dict[bytes, str] = {drawn.key(one): one for one in names if one} | {b"": ""}
    chains = {page: model.chain(*page[:2]) or [] for page in model.records}
    assert found(spaces, name_of) == {
        page: (
            Place(segment, at * RECORD_BYTES), digest(segment, at), model.before[page[:2]],
            len(chains[page]),
        )
        for page, (segment, at) in standing.items()
    }  # fmt: skip
    assert pages == len(standing)
    for at, space in enumerate(spaces):
        needed = {one for page in standing if page[0] == at for one in chains[page]}
        assert {name_of[one] for one in space.index} == needed, "nodes that lead to no page"
        assert space.disk_bytes == RECORD_BYTES * sum(page[0] == at for page in standing)
    left_out = [page for page in model.records if page not in standing and chains[page]]
    assert world.table.counts["orphaned_bytes"] == RECORD_BYTES * len(left_out)
    assert world.table.counts["recovery_refused_shards"] == model.refused
    for at, name, shard in model.records:
        chain = chains[at, name, shard][::-1]
        if SHARDS[shard] is not SMALL_WINDOW and chain:
            hit = [(at, one, shard) in standing for one in chain]
            packed = b"".join(map(drawn.key, chain))
            pages = [*hit, False].index(False)
            assert world.table.lookup(spaces[at], [shard], packed) == (pages, 0)
