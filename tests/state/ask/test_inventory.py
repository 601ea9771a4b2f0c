"""Goal: a walk in turns, with the events since it began, is exactly what the node has."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.events.publisher import RemovedEvent, StoredEvent
from kvstore.protocol.page import PrefixKey
from kvstore.server.publish import MEDIA, events_of
from kvstore.state.ask.inventory import HOST, SSD, HeldPages, sample, shard_of, tiers_of, walk
from kvstore.state.table.pages import PageTable
from kvstore.state.tree.prefix_tree import SHELF_NODES, PrefixTree
from tests.state.world import FULL, FULL_2, ROOT, World, chain, identity, key

SHARDS = (FULL, FULL_2)
PATHS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=12)


def keys_of(held: HeldPages) -> list[bytes]:
    return [held.packed[at : at + 32] for at in range(0, len(held.packed), 32)]


Page = tuple[str, str, str, bytes]
"""Space, digest of the shard, medium, key."""


class Follower:
    """What a follower of events knows: pages of a walk, and the events since."""

    def __init__(self) -> None:
        self.pages: set[Page] = set()

    def add(self, held: list[HeldPages]) -> None:
        for pages in held:
            space, shard, tier, _ = pages
            where = (space.label, space.shards[shard].event_label, MEDIA[tier])
            self.pages |= {(*where, one) for one in keys_of(pages)}

    def replay(self, events: list[object]) -> None:
        for event in events:
            assert isinstance(event, StoredEvent | RemovedEvent)
            where = (event.space, event.shard_digest, event.medium)
            pages = {(*where, one) for one in event.block_hashes}
            stored = isinstance(event, StoredEvent)
            self.pages = self.pages | pages if stored else self.pages - pages


def truth(table: PageTable) -> set[Page]:
    """The READY pages, by looking at every node."""
    found: set[Page] = set()
    for space in table.spaces:
        for node in space.nodes.values():
            for shard in node.digests:
                label = space.shards[shard].event_label
                media = {"CPU": shard in node.slots, "STORAGE": shard in node.disk}
                found |= {(space.label, label, one, node.key) for one in media if media[one]}
    return found


def spread(space: PrefixTree) -> None:
    """Let the pages that come next stand on another shelf."""
    for filler in range(SHELF_NODES):
        space.node(key(f"filler{filler} {len(space.nodes)}"), ROOT)


def change(world: World, process: object, space: PrefixTree, chance: random.Random) -> None:
    """Store a prompt, take a page out with those below it, or begin what is not READY yet."""
    ready = [node for node in space.nodes.values() if node.ready]
    path = "".join(chance.choices("abc", k=chance.randint(1, 5)))
    match chance.randrange(4):
        case 0 | 1:
            world.store(process, space, path, shard=chance.randrange(2))
        case 2 if ready:
            node = chance.choice(ready)
            shard = chance.choice(list(node.digests))
            world.table.residents.drop(node, shard, "operator")
        case 3:
            world.begin(process, space, path, shard=chance.randrange(2))


@given(PATHS, PATHS, st.randoms(use_true_random=False))
def test_a_walk_and_the_events_since_it_began_are_what_the_node_has(stored, others, chance):
    world = World(extents=3, slots_each=8)  # so little that pages are evicted
    process = world.process()
    spaces = [world.space(process, SHARDS)]
    spaces.append(world.table.spaces.open(process.session, identity(model="other"), SHARDS)[0])
    for path, other in zip(stored, others, strict=False):
        for space, one in zip(spaces, (path, other), strict=True):
            world.store(process, space, one, shard=chance.randrange(2))
        if chance.random() < 0.3:
            spread(spaces[0])
    world.table.actions.clear()
    follower = Follower()
    for held in walk(world.table):
        follower.add(held)
        for _ in range(chance.randrange(4)):
            change(world, process, chance.choice(spaces), chance)
    follower.replay(events_of(world.table.actions))

    assert follower.pages == truth(world.table)


def test_a_walk_alone_shows_every_page_once_and_nothing_that_is_not_ready():
    world = World(extents=4, slots_each=64)
    process = world.process()
    space = world.space(process, SHARDS)
    for number in range(40):
        world.store(process, space, f"{number % 7}{number}", shard=number % 2)
        if number % 10 == 0:
            spread(space)
    world.begin(process, space, "never ready")
    shown = Counter(
        (pages.space.label, SHARDS[pages.shard].digest.hex()[:16], MEDIA[pages.tier], one)
        for held in walk(world.table)
        for pages in held
        for one in keys_of(pages)
    )

    assert set(shown) == truth(world.table)
    assert set(shown.values()) == {1}


def test_heads_come_before_tails():
    world = World(extents=4, slots_each=64)
    process = world.process()
    space = world.space(process)
    for _ in range(3):
        spread(space)
        world.store(process, space, "abcdefgh")
    keys = [one for held in walk(world.table) for pages in held for one in keys_of(pages)]

    assert keys == chain("abcdefgh")


def test_tiers_are_told_key_by_key_and_of_unknown_keys_there_are_none():
    world = World(extents=2, slots_each=8)
    process = world.process()
    space = world.space(process, SHARDS)
    world.store(process, space, "abc")
    world.store(process, space, "x", shard=1)
    asked = [*chain("abc"), key("x"), PrefixKey(bytes(32)), key("ab")]

    def tiers(shard: int) -> bytes:
        return b"".join(tiers_of(space, shard, b"".join(asked)))

    assert tiers(0) == bytes([HOST] * 3 + [0, 0, HOST])
    assert tiers(1) == bytes([0] * 3 + [HOST, 0, 0])
    assert HOST & SSD == 0


def test_a_shard_is_found_by_its_names_in_events_only():
    world = World(extents=2, slots_each=8)
    space = world.space(world.process(), SHARDS)
    label = FULL_2.digest.hex()[:16]

    assert shard_of(world.table, space.label, label) == (space, 1)
    assert shard_of(world.table, space.label, label[:-1]) is None
    assert shard_of(world.table, "0" * 64, label) is None


@pytest.mark.parametrize("wanted", [1, 50, 300, 4_096])
def test_a_sample_has_so_many_different_keys_that_the_node_has(wanted):
    world = World(extents=8, slots_each=64)
    process = world.process()
    space = world.space(process)
    for number in range(400):
        world.store(process, space, chr(1000 + number))
    dice = random.Random(wanted)
    found = [
        one
        for held in sample(world.table, wanted, dice.randrange, dice.random)
        for pages in held
        for one in keys_of(pages)
    ]

    assert len(found) == len(set(found)) == min(wanted, 400)
    assert set(found) <= set(space.nodes)


def test_every_page_is_as_likely_in_a_sample_wherever_it_stands():
    world = World(extents=8, slots_each=128)
    process = world.process()
    space = world.space(process)
    for number in range(300):  # 256 on one shelf, 44 on the next one
        world.store(process, space, chr(1000 + number))
    dice, drawn = random.Random(1), Counter[bytes]()
    for _ in range(600):
        for held in sample(world.table, 30, dice.randrange, dice.random):
            for pages in held:
                drawn.update(keys_of(pages))
    each = [drawn[key(chr(1000 + number))] for number in range(300)]
    first, second = each[:256], each[256:]

    assert sum(each) == pytest.approx(600 * 30, rel=0.02)
    assert sum(second) / len(second) == pytest.approx(sum(first) / len(first), rel=0.25)


def test_an_empty_node_has_nothing_to_show():
    world = World()

    assert list(walk(world.table)) == []
    assert list(sample(world.table, 10, random.randrange, random.random)) == []


@pytest.mark.parametrize("after", [0, 1, 900])
def test_a_sample_of_a_space_that_changes_before_its_turn_stays_within_what_was_asked(after):
    world = World(extents=32, slots_each=64)
    processes = [world.process(tenant) for tenant in ("red", "blue")]
    first, last = (world.space(one, tenant=one.session.name) for one in processes)
    for process, space in zip(processes, (first, last), strict=True):
        for number in range(20):
            world.store(process, space, chr(1000 + number))
    dice = random.Random(after)
    steps = sample(world.table, 20, dice.randrange, dice.random)

    shown = next(steps)
    for node in list(last.nodes.values())[after:]:
        world.table.residents.drop(node, 0, "operator")
    for number in range(20, after):
        world.store(processes[1], last, chr(1000 + number))
    for held in steps:
        shown += held

    found = [(held.space.label, one) for held in shown for one in keys_of(held)]
    assert len(last.index) == after
    assert len(found) == len(set(found)) <= 22  # a fraction of a page may round up in each space
    assert {label for label, _ in found} == {one.label for one in (first, last) if len(one.index)}
