"""Threads of which one runs at a time, and a test says which: every interleaving can be had again.

A thread may be changed for another wherever it takes or gives back a lock, waits, or uses a socket.
Time is a number: it passes when nobody can run, or when the test says so, which is how a node or a
thread is slow.
"""

import threading
from collections.abc import Callable
from typing import Any

BATON_WAIT_S = 20.0
STEPS_MAX = 200_000


class Deadlock(AssertionError):
    """Nobody can run, and nobody waits for a time."""


class Task:
    """One thread of a schedule."""

    def __init__(self, schedule: "Schedule", name: str, call: Callable[[], object]) -> None:
        self.name = name
        self.call = call
        self.ready: Callable[[], bool] = lambda: True
        self.until = 0.0
        self.finished = False
        self.error: BaseException | None = None
        self.baton = threading.Semaphore(0)
        self._schedule = schedule
        self.thread = threading.Thread(target=self._run, name=f"task-{name}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            assert self.baton.acquire(timeout=BATON_WAIT_S)
            if not self._schedule.ended:
                self.call()
        except Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001  (the test looks at it)
            self.error = error
        self.finished = True
        self._schedule.turn.release()


class Abandoned(BaseException):
    """The schedule has ended before this thread."""


class Schedule:
    """Runs tasks in turns.

    Args:
        choose: which of so many goes on; -1 for time, if it may pass.
        check: called between two steps.
    """

    def __init__(self, choose: Callable[[int], int], check: Callable[[], None]) -> None:
        self._choose = choose
        self._check = check
        self.now = 100.0
        self.tasks: list[Task] = []
        self.turn = threading.Semaphore(0)
        self.current: Task | None = None
        self.ended = False

    def spawn(self, name: str, call: Callable[[], object]) -> Task:
        task = Task(self, name, call)
        self.tasks.append(task)
        return task

    def pause(self, ready: Callable[[], bool] = lambda: True, until: float = 0.0) -> None:
        """In a task: let others run until ``ready``, or the time ``until`` has come."""
        task = self.current
        assert task is not None
        assert task.thread is threading.current_thread()
        task.ready, task.until = ready, until
        self.turn.release()
        assert task.baton.acquire(timeout=BATON_WAIT_S)
        if self.ended:
            raise Abandoned

    def run(self) -> None:
        """Run every task to its end."""
        try:
            for _ in range(STEPS_MAX):
                if all(task.finished for task in self.tasks):
                    return
                self._step()
            raise AssertionError("it goes on for ever")
        finally:
            self._end()

    def _step(self) -> None:
        waiting = [task for task in self.tasks if not task.finished]
        able = [task for task in waiting if task.ready() or 0 < task.until <= self.now]
        later = [task.until for task in waiting if task not in able and task.until]
        if not able and not later:
            raise Deadlock([task.name for task in waiting])
        chosen = self._choose(len(able)) if able else -1
        if later and chosen < 0:
            self.now = min(later)
            return
        self.current = able[chosen]
        self.current.baton.release()
        assert self.turn.acquire(timeout=BATON_WAIT_S), f"{self.current.name} does not pause"
        if self.current.error is not None:
            raise self.current.error
        self.current = None
        self._check()

    def _end(self) -> None:
        self.ended = True
        for task in self.tasks:
            while task.thread.is_alive():
                task.baton.release()
                task.thread.join(0.01)


class Threading:
    """What of :mod:`threading` the client uses, on a schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def Lock(self) -> "Lock":  # noqa: N802
        return Lock(self._schedule)

    def Event(self) -> "Event":  # noqa: N802
        return Event(self._schedule)

    def Thread(self, target: Callable[[], object], name: str, daemon: bool) -> "Thread":  # noqa: N802
        return Thread(self._schedule, target, name)


class Lock:
    """A lock; taking it and giving it back are where others may come first."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        now = self._schedule.now
        wait = blocking and timeout != 0
        self._schedule.pause()
        if self._held and wait:
            until = now + timeout if timeout > 0 else 0.0
            self._schedule.pause(lambda: not self._held, until)
        if self._held:
            return False
        self._held = True
        return True

    def release(self) -> None:
        assert self._held
        self._held = False
        if not self._schedule.ended:
            self._schedule.pause()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Event:
    """An event."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._set = False

    def set(self) -> None:
        self._set = True
        self._schedule.pause()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float) -> bool:
        self._schedule.pause(lambda: self._set, self._schedule.now + timeout)
        return self._set


class Thread:
    """A thread: one more task."""

    def __init__(self, schedule: Schedule, target: Callable[[], object], name: str) -> None:
        self._schedule = schedule
        self._target = target
        self._name = name
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._schedule.spawn(self._name, self._target)
        self._schedule.pause()

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.finished

    def join(self, timeout: float) -> None:
        task = self._task
        assert task is not None
        self._schedule.pause(lambda: task.finished, self._schedule.now + timeout)


class Socket:
    """One end of a connection to a node that runs in the same schedule.

    Attributes:
        sent: bytes on their way to the node.
        answers: bytes on their way back.
        shut: either side has ended it.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.sent = bytearray()
        self.answers = bytearray()
        self.shut = False
        self.closed = False
        self.timeout_s = 1.0

    def send(self, data: Any) -> int:
        self._schedule.pause()
        if self.shut:
            raise BrokenPipeError
        self.sent += data
        return len(data)

    def recv(self, size: int) -> bytes:
        until = self._schedule.now + self.timeout_s
        self._schedule.pause(lambda: bool(self.answers) or self.shut, until)
        if not self.answers and not self.shut:
            raise BlockingIOError
        data = bytes(self.answers[:size])
        del self.answers[:size]
        return data

    def shutdown(self, how: int) -> None:
        if self.closed:
            raise OSError("bad file descriptor")
        self._schedule.pause()
        assert not self.closed, "another file may have its number now"
        self.shut = True

    def close(self) -> None:
        self.closed = self.shut = True

    # ---- what the client calls instead of the functions of kvstore.client.endpoint

    def send_now(self, frame: bytes) -> int:
        if self.shut:
            return -1
        self.sent += frame
        return len(frame)

    def wait_closed(self, timeout_s: float) -> bool:
        self._schedule.pause(lambda: self.shut, self._schedule.now + timeout_s)
        return self.shut
