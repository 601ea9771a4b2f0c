"""Goal: membership and directory are chosen apart from each other: every pair of them works."""

from pathlib import Path

import pytest

from tests.cluster_processes.conftest import ClusterScene, fetch, is_chain, read
from tests.cluster_processes.failing_stores import ClusterStores
from tests.conftest import WaitUntil
from tests.faults import content

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]
AGAIN_S = 30.0


@pytest.mark.parametrize("pair", [("etcd", "redis"), ("redis", "peers")], ids="-".join)
def test_a_page_of_one_node_is_a_hit_on_the_other(
    scene: ClusterScene, tmp_path: Path, wait_until: WaitUntil, pair: tuple[str, str]
) -> None:
    membership, directory = pair
    with ClusterStores(membership, directory, tmp_path) as stores:
        a, b = stores.start(scene, "a", "b")
        for here, there, chain in ((a, b, 1), (b, a, 2)):
            keys = content.keys(chain, 6)
            assert scene.space(here).put(keys, content.pages(chain, 6)).stored == 6
            space = scene.space(there)
            wait_until(lambda: fetch(space, keys) == 6, AGAIN_S)  # noqa: B023
            assert is_chain(chain, read(space, keys))
        for node in (a, b):
            cluster = node.stats()["cluster"]
            assert cluster["membership"]["kind"] == membership
            assert (directory == "redis") == (cluster["directory"]["shared"] is not None)
