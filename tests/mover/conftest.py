"""Every implementation of the mover that this machine has."""

from collections.abc import Iterator

import pytest

from kvstore import mover
from kvstore.mover import Fallback, Native
from kvstore.mover.binary import LIBRARY, load


def implementations() -> Iterator[Native | Fallback]:
    yield Fallback()
    library = load(LIBRARY)
    if library is not None:
        for isa in range(library.kv_best_isa() + 1):
            yield Native(library, isa)


@pytest.fixture(params=list(implementations()), ids=lambda each: each.description)
def implementation(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Native | Fallback:
    chosen: Native | Fallback = request.param
    monkeypatch.setattr(mover, "_chosen", chosen)
    return chosen
