"""Goal: the keys of pages that are on disk only are found as those of a dict are."""

from random import Random

import pytest

from kvstore.state.tree import cold_keys
from kvstore.state.tree.cold_keys import ColdKeys
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.prefix_tree import PrefixTree
from tests.state.world import identity


@pytest.mark.parametrize("seed", range(12))
def test_runs_that_come_part_and_leave_are_found_as_in_a_dict(seed, monkeypatch):
    """With few marks, most of them equal, every other seed; and with buckets of two pages.

    Every third time it is filled with some at first.
    """
    random = Random(seed)
    if seed % 2:
        monkeypatch.setattr(cold_keys, "MARKS_MASK", 7)
    monkeypatch.setattr(cold_keys, "BUCKET_PAGES", 2)
    space = PrefixTree(1, identity())
    cold, model, runs = ColdKeys(), dict[bytes, PrefixNode](), list[PrefixNode]()
    if not seed % 3:
        for _ in range(random.randrange(40)):
            keys = b"".join(random.randbytes(32) for _ in range(random.randint(1, 9)))
            runs.append(PrefixNode(space, keys, None, len(keys) // 32))
        cold.fill(runs)
        model |= {key: node for node in runs for key in node.key_list()}
    for _ in range(400):
        verb = random.choice(("put", "put", "part", "discard"))
        if verb == "put" or not runs:
            keys = [random.randbytes(32) for _ in range(random.randint(1, 9))]
            node = PrefixNode(space, b"".join(keys), None, len(keys))
            cold.put(node, keys)
            model |= dict.fromkeys(keys, node)
            runs.append(node)
        elif verb == "part":
            node = random.choice(runs)
            if node.count > 1:
                at = random.randint(1, node.count - 1)
                head = PrefixNode(space, node.keys[: 32 * at], None, at)
                cold.assign(head.keys, node, head)
                model |= dict.fromkeys(head.key_list(), head)
                node.keys, node.count = node.keys[32 * at :], node.count - at
                runs.append(head)
        else:
            node = runs.pop(random.randrange(len(runs)))
            cold.discard(node, node.key_list())
            for key in node.key_list():
                del model[key]
        assert cold.count == len(model)
        for key in random.sample(sorted(model), min(5, len(model))):
            assert cold.get(key) is model[key]
        assert cold.get(random.randbytes(32)) is None
    assert set(cold) == set(model)
    assert all(cold.get(key) is node for key, node in model.items())


def test_an_entry_that_lies_across_two_entries_is_no_page_of_a_node(monkeypatch):
    """Marks and numbers are all small, so that the end of one and the start of the next is many."""
    monkeypatch.setattr(cold_keys, "MARKS_MASK", 7)
    monkeypatch.setattr(cold_keys, "BUCKET_PAGES", 1000)
    space, cold, random = PrefixTree(1, identity()), ColdKeys(), Random(1)
    nodes = [PrefixNode(space, random.randbytes(32 * 8), None, 8) for _ in range(7)]
    for node in nodes:
        cold.put(node, node.key_list())
    while nodes:
        node = nodes.pop(random.randrange(len(nodes)))
        cold.discard(node, node.key_list())
        assert all(cold.get(key) is other for other in nodes for key in other.key_list())
        assert not any(cold.get(key) for key in node.key_list())


def test_numbers_of_nodes_that_have_left_are_used_again():
    space, cold = PrefixTree(1, identity()), ColdKeys()
    numbers = set[int]()
    for at in range(100):
        node = PrefixNode(space, Random(at).randbytes(32), None, 1)
        cold.put(node, node.key_list())
        numbers.add(node.cold)
        cold.discard(node, node.key_list())

    assert len(numbers) == 1


def test_a_key_that_lies_across_two_keys_of_a_run_is_none_of_its_pages(monkeypatch):
    monkeypatch.setattr(cold_keys, "MARKS_MASK", 0)
    space, cold = PrefixTree(1, identity()), ColdKeys()
    keys = [Random(at).randbytes(32) for at in range(3)]
    node = PrefixNode(space, b"".join(keys), None, 3)
    cold.put(node, keys)

    assert cold.get(node.keys[8:40]) is None
    assert cold.get(keys[2]) is node


def test_pages_are_listed_in_the_order_in_which_they_came_wherever_their_nodes_lie():
    space, cold = PrefixTree(1, identity()), ColdKeys()
    nodes = [PrefixNode(space, Random(at).randbytes(64), None, 2) for at in range(40)]
    for serial, node in enumerate(nodes):
        node.serial = 2 * serial
    for node in Random(1).sample(nodes, len(nodes)):
        cold.put(node, node.key_list())

    assert list(cold) == [key for node in nodes for key in node.key_list()]
