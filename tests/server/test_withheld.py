"""Goal: memory that the clients of an earlier boot have let go of is taken back, if later."""

import threading
from types import SimpleNamespace
from typing import Any

from kvstore.server.daemon import Daemon
from kvstore.state.tree.slots import SlotTable
from tests.loops import in_loop


@in_loop
async def test_memory_that_no_thread_can_look_for_is_taken_back_later(monkeypatch, caplog):
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    slots, made = SlotTable(1 << 16, 1, withheld=1), list[int]()
    daemon: Any = object.__new__(Daemon)
    daemon.config = SimpleNamespace(host=SimpleNamespace(extent_bytes=1 << 16))
    daemon.memory = SimpleNamespace(create=made.extend)
    daemon._record = SimpleNamespace(stale_bytes=lambda: 0)
    daemon._table = SimpleNamespace(slots=slots)

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        await daemon._take_back()
    assert (slots.withheld, made) == (1, [])
    assert "can't start new thread" in caplog.text

    await daemon._take_back()
    assert (slots.withheld, made) == (0, [1])
