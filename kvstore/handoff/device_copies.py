"""Copies in progress between a device and pinned staging, and a thread that reports their ends.

A device works asynchronously. It may fail, or never finish, or not even accept a copy: the call
that submits one blocks when its queue is full. After :data:`DEVICE_S` a copy has failed, but its
slot and its blocks stay in use until the device has really finished with them. So the thread that
watches for this submits nothing to the device.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.mover.kvpool import HeadRows
from kvstore.mover.push_way import BlockRows, DeviceWay, StartedCopy
from kvstore.protocol.errors import DeviceUnavailable

DEVICE_S = 10.0
"""Time limit of the device for a copy, including the engine's step before it; and of the wait for
staging. Less than the silence limit of a handoff, so that its failure has the right cause."""
_PAUSE_S_MIN: Final = 0.0001
_PAUSE_S_MAX: Final = 0.005
_LATE_PAUSE_S: Final = 0.05
_CLOSE_S: Final = 1.0
"""Time limit for the threads to notice that the last copy is late."""
_LOG: Final = logging.getLogger(__name__)

CopyEnded = Callable[[str, bool], None]
"""Gets why a copy has failed, empty = it has not; and whether the device has finished with blocks
and slot. If it has not, this is called again when it has. Called without locks."""


class _Flying:
    """A copy that the device is not known to have finished."""

    def __init__(self, slot: int, ended: CopyEnded) -> None:
        self.slot, self.ended = slot, ended
        self.until = time.monotonic() + DEVICE_S
        self.fence: Any = None
        self.why = ""
        self.is_taken = self.is_reported = False

    def taken(self, started: StartedCopy) -> None:
        """The call that submitted it to the device has returned."""
        self.fence = started.fence
        if started.why and not self.why:  # else it was told meanwhile that it is late
            self.why = started.why
        self.is_taken = True

    def look(self, now: float) -> bool:
        """Whether the device has finished it; ``why`` says if it is late or unknown."""
        taken = self.is_taken
        if taken and self.fence is not None:
            try:
                if self.fence.done():
                    return True
            except DeviceUnavailable as error:
                self.why = self.why or str(error)
            except Exception as error:  # nobody would look at the others any more
                if not self.why:
                    _LOG.exception("a copy of a handoff was abandoned after an internal error")
                self.why = self.why or said_of(error)
        if now >= self.until:
            verb = "finished" if taken else "taken"
            self.why = self.why or f"the device has not {verb} a copy after {DEVICE_S:.0f} s"
        return False


class DeviceCopies:
    """The copies of one manager, all in one direction; thread-safe.

    Args:
        way: closed by this object.
        feed: called repeatedly by a thread of its own, to start copies; returns whether some wait.
        late: called repeatedly by the thread that reports ends, to give up copies that wait.
    """

    def __init__(
        self, way: DeviceWay, feed: Callable[[], bool] | None = None,
        late: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self._way = way
        self._feed, self._late = feed, late
        self._changed = threading.Condition()
        self._free = list(range(len(way.slots)))
        self._taken: Counter[str | bytes] = Counter()  # slots that wait for each peer
        self._flying: list[_Flying] = []
        self._woken = self._hungry = self._waiting = self._closed = False
        self._feeds = feed is not None  # its thread has not ended
        name = "kvstore-handoff-device"
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True)]
        if feed is not None:
            feeder = threading.Thread(target=self._run_feed, name=name, daemon=True)
            self._threads.insert(0, feeder)
        for thread in self._threads:
            thread.start()

    def take(self, timeout_s: float) -> int:
        """A free slot; -1 = there was none in time, or the device is late."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._is_late, timeout_s)
            return self._free.pop() if self._free and not self._is_late else -1

    def take_for(self, peer: str | bytes, timeout_s: float) -> int:
        """The same for what a peer sends, or gets: never more slots than it leaves free.

        So a peer that is slow has half of the slots at most, and there is one for each of the next
        peers; :meth:`done_for` is called when nothing of the slot waits for the peer any more.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._may_take(peer) or self._is_late, timeout_s)
            if self._is_late or not self._may_take(peer):
                return -1
            self._taken[peer] += 1
            return self._free.pop()

    def done_for(self, peer: str | bytes) -> None:
        """A slot taken for a peer waits for it no more; the slot may be in use still."""
        with self._changed:
            self._taken[peer] -= 1
            self._taken = +self._taken
            self._changed.notify_all()

    def free(self, slot: int) -> None:
        """Give a slot back that no copy uses."""
        with self._changed:
            assert slot not in self._free
            self._free.append(slot)
            self._woken = self._hungry = True
            self._changed.notify_all()

    @property
    def flying(self) -> int:
        """How many the device has not finished."""
        return len(self._flying)

    def slot(self, slot: int) -> npt.NDArray[np.uint8]:
        """The memory of a slot."""
        memory: npt.NDArray[np.uint8] = self._way.slots[slot]
        return memory

    def begin(
        self, slot: int, rows: Sequence[BlockRows], heads: HeadRows | None, after: Sequence[Any],
        ended: CopyEnded,
    ) -> None:  # fmt: skip
        """Give a copy to the device; a slot whose copy has failed is given back by this.

        Waits as long as the device takes nothing; the copy has failed meanwhile.

        Args:
            slot: that was taken; if the copy ends well, it is the caller's again.
            rows: what is in the slot, or is to be.
            heads: see :meth:`kvstore.mover.push_way.DeviceWay.copy`.
            after: fences that the device reaches before.
            ended: told its end, by the thread.
        """
        flying = _Flying(slot, ended)
        with self._changed:
            self._flying.append(flying)
        self.wake()
        try:
            started = self._way.copy(slot, rows, heads, after)
        except Exception as error:  # it may have been given to the device: nobody can tell
            _LOG.exception("a copy of a handoff was abandoned after an internal error")
            started = StartedCopy(None, said_of(error))
        with self._changed:
            flying.taken(started)
        self.wake()

    def wake(self) -> None:
        """Let the thread look for copies to begin."""
        with self._changed:
            self._woken = self._hungry = True
            self._changed.notify_all()

    def close(self) -> None:
        """Wait for all copies, as long as one may take; memory that is still in use stays."""
        with self._changed:
            self._closed = True
        self.wake()
        until = time.monotonic() + DEVICE_S + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if self._flying or any(thread.is_alive() for thread in self._threads):
            _LOG.error(
                "%d copies of handoffs did not finish on the device: see its errors (nvidia-smi,"
                " dmesg); their blocks and staging stay in use",
                max(1, len(self._flying)),
            )
        else:
            self._way.close()

    # ---- internal ---------------------------------------------------------------------------

    def _may_take(self, peer: str | bytes) -> bool:
        return self._taken[peer] < len(self._free)

    @property
    def _is_late(self) -> bool:
        return any(one.is_reported for one in self._flying)

    @property
    def _is_over(self) -> bool:
        """Whether all copies were reported; the feeding thread may be blocked in a reported one."""
        if not self._closed or not all(one.is_reported for one in self._flying):
            return False
        return not self._feeds or not all(one.is_taken for one in self._flying)

    def _run(self) -> None:
        pause_s = _PAUSE_S_MIN
        while True:
            with self._changed:
                if not (self._woken or self._is_over):
                    self._changed.wait(self._pause(pause_s))
                woken, self._woken = self._woken, False
                flying = list(self._flying)
                if self._is_over:
                    return
            self._give_up_late()
            ended = self._look(flying)
            pause_s = _PAUSE_S_MIN if woken or ended else min(2 * pause_s, _PAUSE_S_MAX)

    def _run_feed(self) -> None:
        """Begin copies, until this is closed."""
        assert self._feed is not None
        while not self._closed:
            try:
                waiting = self._feed()
            except Exception:  # no copy would ever be begun any more
                _LOG.exception("copies of handoffs continue after an internal error")
                waiting = True
            with self._changed:
                if waiting != self._waiting:
                    self._waiting, self._woken = waiting, True
                    self._changed.notify_all()
                if not (self._hungry or self._closed):
                    self._changed.wait(_LATE_PAUSE_S if waiting else None)
                self._hungry = False
        with self._changed:
            self._feeds, self._woken = False, True
            self._changed.notify_all()

    def _give_up_late(self) -> None:
        try:
            if self._late is not None:
                self._late()
        except Exception:  # no copy would ever end any more
            _LOG.exception("copies of handoffs continue after an internal error")

    def _pause(self, pause_s: float) -> float | None:
        if any(not one.is_reported for one in self._flying):
            return pause_s
        return _LATE_PAUSE_S if self._flying or self._waiting else None

    def _look(self, flying: Sequence[_Flying]) -> bool:
        """Tell the ends of copies; returns whether there was one."""
        any_ended, now = False, time.monotonic()
        for one in flying:
            done = one.look(now)
            if not done and (one.is_reported or not one.why):
                continue
            with self._changed:
                one.is_reported = any_ended = self._hungry = True
                if done:
                    self._flying.remove(one)
                    if one.why:
                        self._free.append(one.slot)
                self._changed.notify_all()
            try:
                one.ended(one.why, done)
            except Exception:  # the others have ends too
                _LOG.exception("copies of handoffs continue after an internal error")
        return any_ended


def said_of(error: Exception) -> str:
    """A fault of ours in a few words."""
    return repr(error)[:200]
