"""Goal: writers of one chain take turns: each waits for the other's page, for a limited time."""

import pytest

from kvstore.protocol import wire
from kvstore.state.tree.actions import PageStatus
from tests.node.test_protocol import DIGEST, KEYS, MS, Wire

WAIT_MS = 100


@pytest.fixture
def node() -> Wire:
    """A node with three processes, connections 1 to 3."""
    made = Wire()
    for connection in (1, 2, 3):
        made.join(connection)
    return made


def begin(node: Wire, connection: int, page: int, wait_ms: int = WAIT_MS, shard: int = 0):
    """Ask for the slot of one page behind the one before it."""
    keys = KEYS[page : page + 1]
    put = 100 + page
    request = wire.BeginPut(
        0, put, 0, shard, keys.packed, keys.parent, wait_ms=wait_ms, follows=True
    )
    return node.ask(connection, request)


def granted(answers: list[wire.Answer]) -> list[bytes]:
    return [answer.statuses for answer in answers if isinstance(answer, wire.PutGranted)]


GRANTED = bytes([PageStatus.GRANTED])
REFUSED = bytes([PageStatus.NO_PARENT])


def test_a_page_waits_until_the_one_before_it_is_being_written(node):
    assert begin(node, 2, 1) is None
    assert begin(node, 3, 2) is None, "of a page that waits itself, too"
    first = begin(node, 1, 0)

    assert granted([first]) == [GRANTED]
    assert granted(node.answers(2)) == [GRANTED], "not only when it is written"
    assert granted(node.answers(3)) == [GRANTED]
    for connection, put in ((2, 101), (3, 102), (1, 100)):
        node.ask(connection, wire.CommitPut(0, put, DIGEST))
    assert node.lookup(1, KEYS[:3]) == (3, 0)


def test_the_page_before_counts_in_the_same_shard_only(node):
    assert begin(node, 2, 1) is None
    node.store(1, KEYS[:1], shard=1)
    assert not node.answers(2)
    node.store(1, KEYS[:1])

    assert granted(node.answers(2)) == [GRANTED]
    node.ask(2, wire.AbortPut(101))


@pytest.mark.parametrize("gives_up", [False, True])
def test_a_page_whose_predecessor_never_comes_is_refused_at_its_deadline(node, gives_up):
    assert begin(node, 2, 1) is None
    if gives_up:
        node.ask(1, wire.AbortPut(node.begin(1, KEYS[:1])))
        assert granted(node.answers(2)) == [GRANTED]
        node.ask(2, wire.CommitPut(0, 101, DIGEST))
        assert node.lookup(2, KEYS[:2]) == (0, 0), "what it wrote nobody can reach"
        return
    node.now_ns += (WAIT_MS + 1) * MS
    node.node.advance(node.now_ns)

    assert granted(node.answers(2)) == [REFUSED]


def test_who_does_not_ask_to_follow_is_refused_at_once(node):
    assert granted([begin(node, 1, 1, wait_ms=0)]) == [REFUSED]
    request = wire.BeginPut(0, 7, 0, 0, KEYS[1:2].packed, KEYS[1:2].parent, wait_ms=WAIT_MS)
    assert granted([node.ask(1, request)]) == [REFUSED]
