"""Goal: a node takes no record for a page that is not as long as the pages of its shard."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import msgspec
import pytest

from kvstore.config import SSDConfig
from kvstore.node.node import Node
from kvstore.node.requests import NodeLimits
from kvstore.node.ssd import DiskTier
from kvstore.protocol.page import CanonicalLayout
from kvstore.state.table.invariants import check
from kvstore.state.tree.slots import SlotTable
from kvstore.testing.tiers import SHARD, SPACE, TierDriver, laid_out
from kvstore.tier.host import HostMemory
from tests.tier.ssd.conftest import HOME, SEGMENT_BYTES, open_log, pages, recovered

LARGE = msgspec.structs.replace(SHARD, layout=CanonicalLayout(head_dim=1024))


@contextmanager
def started(disk: Any) -> Iterator[Node]:
    """A node that has started on the log of a disk."""
    limits = NodeLimits(session_quota_bytes=1 << 20, lease_ms_max=1000)
    node = Node("node", bytes(16), SlotTable(1 << 16, 1), limits, lambda: bytes(16))
    capacity = 64 * SEGMENT_BYTES
    config = SSDConfig(
        directories=(str(HOME / "0"),), capacity_bytes=capacity, segment_bytes=SEGMENT_BYTES
    )
    memory = HostMemory("sizes", bytes(16), 1 << 16, prefault=False)
    with closing(memory), closing(DiskTier(config, node, memory, lambda: None, open_log(disk))):
        yield node


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("size", [4096, 70_000])
def test_records_of_another_size_than_their_shards_pages_are_left_out(disk, sealed, size):
    """Their checksums are right; the space that they take is not what the log would count."""
    log = recovered(disk)
    driver = TierDriver(log)
    assert LARGE.page_bytes(SPACE) == 32_768
    other = pages(2 if size > 32_768 else 8, size, shard=LARGE)
    right = pages(3, 32_768, shard=LARGE)
    driver.write(*laid_out(0, other))
    driver.write(*laid_out(1, right))
    if sealed:
        assert driver.seal(0).error is None
    log.close()

    with started(disk) as node:
        [space] = node.pages.spaces
        assert set(space.nodes) == {page.record.key for page in right}
        assert node.pages.counts["recovery_refused_records"] == len(other)
        check(node.pages)


def test_a_start_that_leaves_out_no_record_counts_none(disk):
    log = recovered(disk)
    TierDriver(log).write(*laid_out(0, pages(3, 32_768, shard=LARGE)))
    log.close()

    with started(disk) as node:
        assert "recovery_refused_records" not in node.pages.counts
        assert sum(len(space.nodes) for space in node.pages.spaces) == 3
