"""What every test gets: a leak check, Hypothesis profiles, and child processes that end.

* Autouse: after each test no new thread, file descriptor or child process may be left. Things that
  are still ending get a moment; things that stay fail the test, named.
* ``open_folder`` is a folder for tests of what other users of the machine may do.
* ``spawn`` starts a child process, waits until it says that it is ready, and ends it.
* ``wait_until`` waits for a condition, with a deadline: tests never sleep.
* A test that patches compiled code is left out where the core is compiled (tests/compiled.py).
* Hypothesis: the default profile is small and deterministic; a soak (or Hypothesis's own
  ``--hypothesis-profile soak``) looks long and at random; see :mod:`tests.soaks`.
"""

import contextlib
import functools
import gc
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest

from kvstore.node.describe import core
from tests.soaks import (
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_report_collectionfinish,
    soak_s,
)

__all__ = [  # what pytest finds here
    "pytest_addoption", "pytest_collection_modifyitems", "pytest_report_collectionfinish", "soak_s",
]  # fmt: skip

ROOT = Path(__file__).resolve().parent.parent
LEAK_WAIT_S = 5.0
READY_WAIT_S = 30.0
END_WAIT_S = 30.0
WAIT_S = 25.0
"""Long, as a busy machine stalls for seconds, and more than once; but what is not given back must
be seen before leases end, after 30 s."""
PAUSE_S = 0.005
OUTPUT_TAIL_BYTES = 16_384

hypothesis.settings.register_profile(
    "ci", derandomize=True, database=None, deadline=None, max_examples=25, print_blob=True
)
hypothesis.settings.register_profile(
    "soak", database=None, deadline=None, max_examples=2_000, print_blob=True
)
hypothesis.settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    """A soak run uses the soak profile unless another one is asked for.

    Raises:
        pytest.UsageError: another core would be tested than the one that is asked for.
    """
    wanted = os.environ.get("TESTED_CORE", "pure")
    if core() != wanted:
        raise pytest.UsageError(
            f"the core is {core()}, and tests of the {wanted} one are asked for"
        )
    asked = config.getoption("hypothesis_profile", default=None)
    soak = config.getoption("markexpr") == "soak" or config.getoption("soak")
    if soak and not asked:
        hypothesis.settings.load_profile("soak")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for no cycles while tests are collected, nor later among what was made for that.

    Thousands of tests and their modules stay to the end: each search would walk over all of them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


# The compiled core (tests/compiled.py)


@pytest.fixture
def monkeypatch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As pytest's own; but a test that changes a compiled class is one of the pure core only.

    It may change a number of a compiled module that is not ``Final``: those the code has copied.
    """
    change = monkeypatch.setattr

    def changed(target: object, *rest: object, **options: bool) -> None:
        if core() == "compiled":
            _refuse_compiled(target, rest)
        change(target, *rest, **options)

    monkeypatch.setattr = changed
    return monkeypatch


def _refuse_compiled(target: object, rest: tuple[object, ...]) -> None:
    """Skip or fail a test whose change compiled code would not notice."""
    if isinstance(target, str):
        module, name = import_module(target.rpartition(".")[0]), target.rpartition(".")[2]
    elif isinstance(target, ModuleType):
        module, name = target, str(rest[0])
    else:
        module, name = import_module(_class_of(target).__module__), ""
    if not module.__name__.startswith("kvstore.") or module.__file__.endswith(".py"):
        return
    source = ROOT.joinpath(*module.__name__.split(".")).with_suffix(".py").read_text()
    if re.search(rf"^{name}: Final", source, re.MULTILINE):
        pytest.fail(f"compiled code has copied {name}, for it is Final")
    if not re.search(rf"^{name} = \d", source, re.MULTILINE):
        pytest.skip("it changes compiled code")


def _class_of(target: object) -> type:
    return target if isinstance(target, type) else type(target)


# Waiting

_never = threading.Event()


def wait_for(condition: Callable[[], object], timeout_s: float = WAIT_S) -> bool:
    """Ask ``condition`` again and again until it is true (True) or time is up (False)."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        _never.wait(PAUSE_S)
    return True


WaitUntil = Callable[..., None]


@pytest.fixture(scope="session")
def wait_until() -> WaitUntil:
    """``wait_until(condition, timeout_s=WAIT_S, what="")``: fails the test when time is up."""

    def wait(condition: Callable[[], object], timeout_s: float = WAIT_S, what: str = "") -> None:
        if not wait_for(condition, timeout_s):
            subject = what or getattr(condition, "__name__", repr(condition))
            pytest.fail(f"not within {timeout_s} s: {subject}", pytrace=True)

    return wait


# Leaks


@dataclass(frozen=True)
class Held:
    """What this process holds at one moment."""

    threads: frozenset[threading.Thread]
    descriptors: frozenset[tuple[int, str]]
    children: frozenset[int]

    @classmethod
    def now(cls) -> "Held":
        """Look."""
        children: set[int] = set()
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has just ended
                children.update(map(int, (task / "children").read_text().split()))
        return cls(frozenset(threading.enumerate()), _descriptors(), frozenset(children))

    def beyond(self, before: "Held") -> list[str]:
        """What is held now and was not before, one line each."""
        threads = [
            f"thread {thread.name!r} ({'daemon' if thread.daemon else 'not daemon'})"
            for thread in self.threads - before.threads
        ]
        descriptors = [
            f"descriptor {number} -> {target}"
            for number, target in sorted(self.descriptors - before.descriptors)
        ]
        children = [
            f"child process {pid}: {_command_line(pid)}"
            for pid in sorted(self.children - before.children)
        ]
        return threads + descriptors + children


def _descriptors() -> frozenset[tuple[int, str]]:
    """Every open descriptor with what it is: a path, ``socket:[inode]``, ``/memfd:name``, …"""
    found: set[tuple[int, str]] = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this very listing
            target = str(entry.readlink())
            if not re.fullmatch(r"/proc/\d+/fd", target):
                found.add((int(entry.name), target))
    return frozenset(found)


def _command_line(pid: int) -> str:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "gone"
    return raw.replace(b"\0", b" ").decode(errors="replace").strip() or "ended, not waited for"


@functools.cache
def _open_cuda() -> None:
    """Use CUDA once: its driver keeps descriptors until the process ends."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.ones(1, pin_memory=True).cuda(non_blocking=True).add_(1)
    stream.record_event().synchronize()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread, a file descriptor or a child process behind."""
    if request.node.get_closest_marker("gpu"):
        _open_cuda()
    before = Held.now()
    yield
    if not Held.now().beyond(before):
        return
    gc.collect()  # what only a cycle still holds is late, not leaked
    if not wait_for(lambda: not Held.now().beyond(before), LEAK_WAIT_S):
        leaks = Held.now().beyond(before)
        pytest.fail("left behind:\n  " + "\n  ".join(leaks), pytrace=False)


def pytest_keyboard_interrupt() -> None:
    """A process of several that run tests gets seconds to end: what it started comes first."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        for pid in Held.now().children:
            os.kill(pid, signal.SIGKILL)


# Places


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users get into: ``tmp_path`` is closed to them, above it too."""
    with tempfile.TemporaryDirectory(prefix="kvstore-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


# Child processes


class Process:
    """One child process, its output in files.

    Attributes:
        pid: its process id, and that of the process group it leads.
        stdout_path: where its standard output goes.
        stderr_path: where its standard error goes.
    """

    def __init__(self, args: Sequence[str], env: Mapping[str, str], output: Path) -> None:
        self.args = tuple(map(str, args))
        self.stdout_path = output.with_suffix(".out")
        self.stderr_path = output.with_suffix(".err")
        with self.stdout_path.open("wb") as stdout, self.stderr_path.open("wb") as stderr:
            self._child = subprocess.Popen(
                self.args,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=dict(env),
                cwd=ROOT,
                start_new_session=True,
            )
        self.pid = self._child.pid
        self._ready: re.Match[str] | None = None

    @property
    def ready(self) -> re.Match[str]:
        """The match of the line that said it is ready; its groups carry what it told."""
        assert self._ready is not None, f"{self} was started without waiting for a line"
        return self._ready

    @property
    def stdout(self) -> str:
        """What it has written to standard output so far."""
        return self.stdout_path.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """What it has written to standard error so far."""
        return self.stderr_path.read_text(errors="replace")

    @property
    def returncode(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._child.poll()

    def send_signal(self, number: signal.Signals) -> None:
        """SIGSTOP, SIGCONT, SIGKILL …; nothing happens when it has ended."""
        self._child.send_signal(number)

    def wait(self, timeout_s: float = END_WAIT_S) -> int:
        """Wait for its end and return its exit status; fails the test when time is up."""
        try:
            return self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self} did not end within {timeout_s} s\n{self.report()}")

    def kill(self) -> None:
        """SIGKILL and wait: it is gone afterwards."""
        self._child.kill()
        self.wait()

    def stop(self, timeout_s: float = END_WAIT_S) -> int:
        """SIGTERM (and SIGCONT, should it be stopped), wait; SIGKILL and failure when it is late.

        Returns:
            its exit status.
        """
        if self.returncode is None:
            self._child.terminate()
            self._child.send_signal(signal.SIGCONT)
            if not wait_for(lambda: self.returncode is not None, timeout_s):
                self.kill()
                pytest.fail(f"{self} ignored SIGTERM for {timeout_s} s\n{self.report()}")
        return self.wait()

    def wait_ready(self, pattern: str, timeout_s: float) -> None:
        """Wait for a line of standard output that ``pattern`` finds itself in."""
        line = re.compile(pattern, re.MULTILINE)

        def answered() -> bool:
            ended = self.returncode is not None  # first: its last words are written by then
            whole_lines = self.stdout.rpartition("\n")[0]
            self._ready = line.search(whole_lines)
            return self._ready is not None or ended

        in_time = wait_for(answered, timeout_s)
        if self._ready is None:
            why = f"ended with {self.returncode}" if in_time else f"was silent for {timeout_s} s"
            pytest.fail(f"{self} {why} before a line matched {pattern!r}\n{self.report()}")

    def group_is_gone(self) -> bool:
        """Neither it nor a process it started (and that stayed in its group) is left."""
        return not any(_group_if_alive(entry) == self.pid for entry in Path("/proc").iterdir())

    def report(self) -> str:
        """The end of both outputs, for a failure message."""
        tails = (text[-OUTPUT_TAIL_BYTES:] for text in (self.stdout, self.stderr))
        return "--- stdout\n{}\n--- stderr\n{}".format(*tails)

    def __str__(self) -> str:
        return f"process {self.pid} ({' '.join(self.args)})"


def _group_if_alive(entry: Path) -> int | None:
    """Process group of a /proc entry; None for zombies and for what is no process."""
    if not entry.name.isdecimal():
        return None
    try:
        state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
    except OSError:  # it has just ended
        return None
    return None if state in "ZX" else int(group)


Spawn = Callable[..., Process]


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Spawn]:
    """``spawn(args, ready=pattern, env=None, timeout_s=30.0) -> Process``.

    Starts ``args`` in the project's root and returns once a line of its standard output matches
    ``ready`` (None: at once). ``env`` is added to this process's own environment. When the test
    ends every child gets SIGTERM, then SIGKILL, and must be gone with its whole process group.
    """
    started: list[Process] = []

    def start(
        args: Sequence[str],
        ready: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = READY_WAIT_S,
    ) -> Process:
        output = tmp_path / f"process-{len(started)}"
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
        process = Process(args, environment, output)
        started.append(process)
        if ready is not None:
            process.wait_ready(ready, timeout_s)
        return process

    yield start
    failures: list[str] = []
    for process in reversed(started):
        failures += _end(process)
        sys.stderr.write(f"\n{process}\n{process.report()}\n")  # pytest shows it on failure
    assert not failures, "\n".join(failures)


def _end(process: Process) -> list[str]:
    """End a child and what it started; return what was wrong about it."""
    failures: list[str] = []
    try:
        process.stop()
    except pytest.fail.Exception as failure:
        failures.append(str(failure))
    if not wait_for(process.group_is_gone, END_WAIT_S):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        failures.append(f"{process} left processes of its own behind\n{process.report()}")
    return failures
