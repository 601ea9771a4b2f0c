"""A table whose writer lies: what it says becomes positions in memory."""

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from kvstore.index import layout, runs
from kvstore.index import table as reading
from kvstore.index.layout import HOLDER_BITS_MAX, TableLayout
from kvstore.index.memory import TableMemory
from kvstore.index.table import IndexReader
from tests.index.test_table import CHAINS, HOLDERS, arrays, open_table


@pytest.fixture
def opened() -> Iterator[list[TableMemory]]:
    """Tables, whose memory is closed at the end."""
    tables: list[TableMemory] = []
    yield tables
    while tables:
        tables.pop().close()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("bit", [HOLDER_BITS_MAX, 1 << 40, -1, None])
def test_a_directory_of_nonsense_is_none(
    native: bool, bit: int | None, opened: list[TableMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says becomes a position in memory."""
    if not native:
        monkeypatch.setattr(reading, "LOOKUP", None)
        monkeypatch.setattr(runs, "LOOKUP", None)
    made, reader = open_table(opened, 4000)
    made.apply(*arrays(made, [(1, 0, True), (2, 0, True)]))
    needs = runs.PrefixNeeds([[runs.PartNeed([HOLDERS[0]])]])
    assert reader.match([CHAINS[1:3]], needs).tolist() == [[2]]
    packed = b"\xc1 is no msgpack" if bit is None else msgspec.msgpack.encode([(bit, HOLDERS[0])])
    view = layout.TableView(opened[-1].buffer, TableLayout(4000, 256))
    state = layout.Switch.read(view.header[layout.Field.DIRECTORY])
    view.directories[state.half, : len(packed)] = np.frombuffer(packed, dtype=np.uint8)
    state = state._replace(version=state.version + 1, size=len(packed))
    view.header[layout.Field.DIRECTORY] = state.word()
    assert reader.holders().holders == {}
    needs = runs.PrefixNeeds([[runs.PartNeed([HOLDERS[0]])]])
    assert reader.match([CHAINS[1:3]], needs).tolist() == [[0]]


@pytest.mark.parametrize("sets_max", [0, 1, (1 << 24) + 1])
def test_a_table_that_cannot_be_is_not_opened(sets_max: int, opened: list[TableMemory]) -> None:
    _, reader = open_table(opened, 100)
    header = np.frombuffer(opened[-1].buffer, dtype=np.uint64, count=8)
    header[layout.Field.SETS_MAX] = sets_max
    assert IndexReader(opened[-1].buffer).secret == 0
    assert reader.secret == 0
