"""Pages that one node has are a hit on the other."""

import pytest

from tests.cluster_processes.conftest import ClusterScene, fetch, read
from tests.faults import content

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


def test_a_client_gets_pages_that_only_another_node_has_and_later_ones_are_local(
    scene: ClusterScene,
) -> None:
    a, b = scene.start("a", "b")
    keys = content.keys(1, 6)
    assert scene.space(a).put(keys, content.pages(1, 6)).stored == 6
    there = scene.space(b)
    b.knows(a, 6)

    assert fetch(there, keys) == 6
    assert [bytes(one) for one in content.pages(1, 6)] == read(there, keys)
