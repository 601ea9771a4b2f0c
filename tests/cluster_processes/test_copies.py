"""Copies of pages at several nodes: put with replicas, and what operators start."""

import signal

import pytest

from kvstore.errors import TooFewCopies
from tests.cluster_processes.conftest import ClusterScene, is_chain, read
from tests.faults import content

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


def test_a_put_with_two_replicas_is_a_hit_at_the_second_node_when_the_first_is_killed(
    scene: ClusterScene,
) -> None:
    a, b = scene.start("a", "b")
    keys = content.keys(1, 6)

    assert scene.space(a).put(keys, content.pages(1, 6), replicas=2).stored == 6
    a.signal(signal.SIGKILL)

    there = scene.space(b)
    assert there.lookup(keys).pages == 6
    assert is_chain(1, read(there, keys))


def test_a_put_says_how_many_nodes_have_the_pages_when_too_few_do(scene: ClusterScene) -> None:
    a, b = scene.start("a", "b")
    here, keys = scene.space(a), content.keys(1, 6)

    with pytest.raises(TooFewCopies) as too_few:
        here.put(keys, content.pages(1, 6), replicas=3)
    assert too_few.value.copies == 2
    assert here.lookup(keys).pages == 6

    b.signal(signal.SIGKILL)
    with pytest.raises(TooFewCopies) as too_few:
        here.put(keys, content.pages(1, 6), replicas=2)
    assert too_few.value.copies == 1
    assert here.lookup(keys).pages == 6
