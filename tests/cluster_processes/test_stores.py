"""Goal: a membership in a real etcd or Redis keeps its contract, whatever happens to the server."""

import asyncio
from pathlib import Path

import pytest

from kvstore.testing.leased import LeasedContract
from tests.cluster_processes.store_scenes import KINDS, opening

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


@pytest.mark.parametrize("check", LeasedContract.CHECKS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_membership_in_a_real_store_keeps_the_contract(
    kind: str, check: str, tmp_path: Path
) -> None:
    asyncio.run(getattr(LeasedContract(opening(kind, tmp_path)), check)())
