"""Goal: a job that another transport does not begin leaves nothing held at prefill."""

from types import SimpleNamespace

import numpy as np
import pytest

from kvstore.handoff.messages import RANGES_BYTES_MAX
from kvstore.handoff.push_writes import PushWrites
from kvstore.handoff.staging import Staging

FAULTS = ["none", "takes", "gather", "submit"]


class FaultyWriter:
    """Has room for one gathered job; one of its calls may fail."""

    transport = "for tests"

    def __init__(self) -> None:
        self.gather_memory = np.zeros(RANGES_BYTES_MAX, dtype=np.uint8)
        self.fault = "none"
        self.numbers: list[int] = []

    def fail(self, call: str) -> None:
        if self.fault == call:
            raise RuntimeError(call)

    def begin(self, ended) -> None:
        self.ended = ended

    def takes(self, write) -> bool:
        self.fail("takes")
        return True

    def submit(self, write) -> None:
        self.fail("submit")
        self.numbers.append(write)


def gathered_job(number: int) -> SimpleNamespace:
    share = SimpleNamespace(range_bytes=lambda _: 8)
    place = SimpleNamespace(transport="for tests")
    return SimpleNamespace(
        number=number, room=1, rows=[[0]], ranges=[(0, 0, 1)], share=share, place=place
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_a_write_that_cannot_be_begun_gives_its_memory_back(fault, monkeypatch):
    writer, ended = FaultyWriter(), []
    pool = SimpleNamespace(
        shape=SimpleNamespace(block_bytes=64), is_unchanged=lambda _: True,
        write_of=lambda job, *_: job.number,
    )  # fmt: skip

    def gather(*_):
        writer.fail("gather")
        return [], b""

    monkeypatch.setattr(Staging, "gather", gather)
    writes = PushWrites(writer, pool, lambda job, *_: ended.append(job.number))
    writer.fault = fault
    if fault != "none":
        with pytest.raises(RuntimeError, match=fault):
            writes.submit(gathered_job(1))
        writer.fault = "none"

    assert writes.submit(gathered_job(2)), "there is memory for it"
    assert not writes.submit(gathered_job(3)), "no more is free until the write has ended"
    writer.ended(2, "", False)
    assert writes.submit(gathered_job(4))
    assert (writer.numbers, ended) == ([2, 4], [2])
    assert list(writes._jobs) == [4], "nobody tells the end of what was not begun"
