"""Goal: a failed assertion says what happened to its page before, and the story stays small."""

import pytest

from kvstore.protocol.errors import CapacityError
from kvstore.state.table.invariants import check
from kvstore.state.tree.node import PrefixNode, Retention
from kvstore.state.tree.story import EVENTS_MAX, SHOWN_MAX, Story
from tests.state.disk.disk_world import DiskWorld
from tests.state.world import World, key


def broken(node: PrefixNode | None) -> AssertionError:
    """What an assertion about a node raises."""
    with pytest.raises(AssertionError) as caught:
        assert node is node.space.root if node is not None else False, "something is wrong"
    return caught.value


def told(story: Story, node: PrefixNode | None) -> list[str]:
    error = broken(node)
    story.explain(error)
    [note] = error.__notes__
    return note.splitlines()


def whats(story: Story, node: PrefixNode) -> list[str]:
    """What happened to a page, in order."""
    return [line.split(": ")[1] for line in told(story, node)[1:]]


def test_the_life_of_a_page_is_told_in_order():
    world = DiskWorld(extents=1)
    world.store(world.me, world.mine, "abc")
    lease, _ = world.acquire(world.me, world.mine, "ab")
    world.end_all()
    world.table.release(world.me, lease)
    node = world.node("ab")

    assert whats(world.table.story, node) == [
        "granted", "stored", "DiskWrite begun", "leased", "DiskWrite ended", "TierStored ssd",
        "released",
    ]  # fmt: skip
    assert told(world.table.story, node)[0].startswith(
        f"the last events of page {key('ab').hex()[:16]}, 7 of "
    )


@pytest.mark.parametrize("text", [(), ("it is not right",)])
def test_an_assertion_names_its_page_where_frames_have_no_variables(text):
    world = World()
    engine = world.process()
    space = world.space(engine)
    world.store(engine, space, "abc")
    node = space.nodes[key("ab")]
    error = AssertionError((*text, node) if text else node)

    world.table.story.explain(error)

    assert error.__notes__[0].startswith(f"the last events of page {key('ab').hex()[:16]}, 2 of ")
    assert f"<node {key('ab').hex()[:16]} of space 0: 1 pages up to depth 2>" in str(error)


def test_a_failed_check_of_the_state_names_the_page_concerned():
    world = World()
    engine = world.process()
    space = world.space(engine)
    world.store(engine, space, "abc")
    node = space.nodes[key("ab")]
    node.memory_only = node.ready << 1

    with pytest.raises(AssertionError) as caught:
        check(world.table)
    world.table.story.explain(caught.value)

    assert node in caught.value.args[0]
    assert caught.value.__notes__[0].startswith(f"the last events of page {key('ab').hex()[:16]}, ")


def test_events_of_other_pages_are_left_out():
    world = World()
    engine = world.process()
    space = world.space(engine)
    world.store(engine, space, "abc")
    world.acquire(engine, space, "a")
    world.store(engine, space, "xyz")

    assert whats(world.table.story, space.nodes[key("a")]) == ["granted", "stored", "leased"]
    assert whats(world.table.story, space.nodes[key("abc")]) == ["granted", "stored"]


def test_a_page_of_another_space_under_the_same_key_has_its_own_story():
    world = World()
    red, blue = world.process("red"), world.process("blue")
    mine, other = world.space(red, tenant="red"), world.space(blue, tenant="blue")
    world.store(red, mine, "a")
    world.store(blue, other, "a")
    world.acquire(blue, other, "a")

    assert whats(world.table.story, mine.nodes[key("a")]) == ["granted", "stored"]


def test_what_became_of_a_page_that_left_is_told_too():
    world = World()
    engine = world.process()
    space = world.space(engine)
    world.store(engine, space, "ab", keep=Retention(read_once=True))
    node = space.nodes[key("a")]
    lease, _ = world.acquire(engine, space, "a", until_ns=5)
    world.table.expire(6)
    world.table.release(engine, lease)

    assert whats(world.table.story, node)[-4:] == [
        "leased",
        "expired",
        "released",
        "removed read_once",
    ]
    assert whats(world.table.story, node)[:2] == ["granted", "stored"]


def test_a_put_that_is_lost_or_taken_back_is_told():
    world = World()
    engine = world.process()
    space = world.space(engine)
    number, _, _ = world.begin(engine, space, "a")
    first = space.nodes[key("a")]
    world.table.abort_put(engine, number)
    world.begin(engine, space, "b")
    second = space.nodes[key("b")]
    world.table.lose(engine)

    assert whats(world.table.story, first) == ["granted", "abandoned", "aborted"]
    assert whats(world.table.story, second) == ["granted", "abandoned", "lost"]


def test_without_a_page_the_last_events_of_all_are_told():
    world = World(extents=8, slots_each=256)
    engine = world.process()
    space = world.space(engine)
    for at in range(2 * SHOWN_MAX):
        world.store(engine, space, chr(0x4E00 + at))

    lines = told(world.table.story, None)

    assert len(lines) == 1 + SHOWN_MAX
    assert "of any page" in lines[0]
    assert key(chr(0x4E00 + 2 * SHOWN_MAX - 1)).hex()[:16] in lines[-1]


def test_the_story_forgets_what_is_long_ago():
    world = World()
    engine = world.process()
    space = world.space(engine)
    world.store(engine, space, "a")

    for _ in range(EVENTS_MAX):
        lease, _ = world.acquire(engine, space, "a")
        world.table.release(engine, lease)

    assert len(list(world.table.story)) == EVENTS_MAX
    assert {one.what for one in world.table.story} == {"leased", "released"}


def test_an_error_is_explained_once_and_a_refusal_never():
    story, error, refusal = World().table.story, broken(None), CapacityError("full")

    story.explain(error)
    story.explain(error)
    story.explain(refusal)

    assert len(error.__notes__) == 1
    assert not hasattr(refusal, "__notes__")
