"""Goal: an address is found elsewhere only if all of its bytes are."""

import numpy as np
import pytest

from kvstore.transport.regions import Regions


@pytest.fixture
def regions():
    found = Regions()
    found.add(1000, 100, 5000)
    found.add(2000, 50, 9000)
    found.add(1100, 10, 100)
    return found


def addresses(*values):
    return np.array(values, dtype=np.uint64)


def test_addresses_in_pieces_are_moved(regions):
    found = regions.elsewhere(addresses(1000, 1095, 2045, 1105), 5)
    assert found.tolist() == [5000, 5095, 9045, 105]
    assert regions.total_bytes == 160


@pytest.mark.parametrize("outside", [999, 1096, 1500, 2046, 0, 2**64 - 1])
def test_an_address_outside_makes_all_unknown(regions, outside):
    assert regions.elsewhere(addresses(1000, outside), 5) is None


def test_more_bytes_than_a_piece_has_are_unknown(regions):
    assert regions.elsewhere(addresses(1100), 11) is None
    assert regions.elsewhere(addresses(1000), 101) is None
    assert regions.elsewhere(addresses(), 1) is None


def test_a_forgotten_piece_is_unknown(regions):
    assert regions.remove(2000)
    assert not regions.remove(2000)
    assert regions.elsewhere(addresses(2000), 1) is None
    assert regions.overlaps(1050, 1)
    assert not regions.overlaps(1110, 100)
