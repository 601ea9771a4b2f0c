"""Goal: who waits for a job of the mover sees each segment when it is there, and can end it."""

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from kvstore import mover
from kvstore.mover import Fallback, Native, Order, Pieces, Progress, Word
from tests.mover.layouts import Layout, address, even_layout, u64, zeros

WAIT_S = 20.0

pytestmark = pytest.mark.usefixtures("implementation")


class Running:
    """A scatter in another thread."""

    def __init__(self, layout: Layout, order: Order) -> None:
        self.layout, self.order, self.progress = layout, order, Progress()
        self.digests = layout.digests()
        self.ok: npt.NDArray[np.bool_] | None = None
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        layout = self.layout
        args = (layout.pages, layout.page_bytes, self.digests, layout.seeds, layout.pieces)
        self.ok = mover.scatter(*args, self.progress, self.order)
        self.progress.finish()

    def join(self) -> npt.NDArray[np.bool_]:
        self.thread.join(WAIT_S)
        assert self.ok is not None
        return self.ok


def test_segments_are_counted_in_order_and_hold_their_bytes_when_they_are() -> None:
    segments = 8
    layout = even_layout(pages=24, segments=segments)
    whole = layout.spread(layout.view)
    job = Running(layout, "segment")
    job.thread.start()
    for segment in range(segments):
        assert job.progress.wait(segment + 1, WAIT_S)
        assert job.progress.good_pages == layout.page_count
        for page in range(layout.page_count):
            slot = page * segments + segment
            first = int(layout.pieces.end[slot - 1]) if slot else 0
            for index in range(first, int(layout.pieces.end[slot])):
                offset = layout.offsets[index]
                part = slice(offset, offset + layout.lengths[index])
                assert (layout.pool[part] == whole[part]).all(), (segment, page)
    assert job.join().all()
    assert not job.progress.wait(segments + 1, WAIT_S), "it finished with fewer"


def test_a_waiter_wakes_when_its_segment_is_done_and_when_the_job_finishes() -> None:
    progress, answers = Progress(), dict[int, bool]()
    arrived = threading.Barrier(3)

    def wait(count: int) -> None:
        arrived.wait(WAIT_S)
        answers[count] = progress.wait(count, 2 * WAIT_S)  # longer than the joins below

    threads = [threading.Thread(target=wait, args=(count,)) for count in (1, 2)]
    for thread in threads:
        thread.start()
    arrived.wait(WAIT_S)
    mover._chosen.publish(progress, Word.DONE, 1)
    threads[0].join(WAIT_S)
    assert answers == {1: True}
    progress.finish()
    threads[1].join(WAIT_S)
    assert answers == {1: True, 2: False}


def test_a_wait_for_what_does_not_come_ends_when_time_is_up() -> None:
    assert not Progress().wait(1, 0.01)
    assert Progress().wait(0, 0.0)


@pytest.mark.parametrize("order", ["page", "segment"])
def test_a_job_cancelled_beforehand_writes_nothing(order: Order) -> None:
    job = Running(even_layout(), order)
    job.progress.cancel()
    job.thread.start()
    assert not job.join().any()
    assert not job.layout.pool.any()
    assert job.progress.done == 0


def test_a_gather_cancelled_beforehand_writes_nothing() -> None:
    layout, progress = even_layout(), Progress()
    before = layout.memory.copy()
    layout.pool[:] = 1
    progress.cancel()
    args = (layout.pages, layout.page_bytes, layout.pieces, layout.seeds)
    assert not mover.gather(*args, progress).any()
    assert (layout.memory == before).all()


@pytest.mark.parametrize("order", ["page", "segment"])
def test_other_threads_run_while_a_job_does_and_can_cancel_it(
    implementation: Native | Fallback, wait_until: Callable[..., None], order: Order
) -> None:
    """One page ten thousand times over takes most of a second; its first byte shows that it began.

    A job that kept the GIL would be at its end before this thread could cancel it.
    """
    layout, count = even_layout(pages=1, segments=1), 10_000
    layout.pool = zeros(1 << 20)
    layout.pieces = Pieces.contiguous(u64(address(layout.pool)).repeat(count), 1 << 20)
    layout.view[0, 0] = 200
    job = Running(layout, order)
    job.digests = job.digests.repeat(count, axis=0)
    layout.pages, layout.seeds = layout.pages.repeat(count), layout.seeds.repeat(count)
    job.thread.start()
    if order == "page" and isinstance(implementation, Native):  # the fallback verifies all first
        wait_until(lambda: layout.pool[0] == 200)
    job.progress.cancel()
    ok = job.join()
    finished = int(np.count_nonzero(ok))
    assert finished < (count if order == "page" else 1)
    assert ok[:finished].all()
    layout.pool[:] = 0
    assert not layout.pool.any()
