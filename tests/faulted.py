"""Memory whose every first touch is seen, and that forgets: who reads a byte again faults again.

It is made with ``userfaultfd``, so what it shows does not depend on chance. A machine or a
container that does not allow that skips the test, by name.
"""

import ctypes
import fcntl
import mmap
import os
import platform
import select
import struct
import threading
from collections import Counter
from types import TracebackType
from typing import Final, Self

import pytest

_SYSCALL: Final = {"x86_64": 323, "aarch64": 282}
_USER_MODE_ONLY: Final = 1
_API: Final = 0xC018AA3F
_REGISTER: Final = 0xC020AA00
_COPY: Final = 0xC028AA03
_MISSING: Final = 1
_EVENT_FAULT: Final = 0x12
_MESSAGE_BYTES: Final = 32
_KEPT: Final = 2
"""Memory pages that stay: one instruction may touch two."""


class FaultedMemory:
    """Memory with a content, page by page of memory; use it as a context manager.

    Args:
        content: what is read there.
        gate: whoever reads waits until it is set; also the kernel, on behalf of a call, if this
            user may have that.

    Attributes:
        address: where it begins.
        touched: memory page → how often it had to be brought.
    """

    def __init__(self, content: bytes, gate: threading.Event | None = None) -> None:
        number = _SYSCALL.get(platform.machine())
        if number is None:
            pytest.skip(f"no number of userfaultfd for {platform.machine()}")
        libc = ctypes.CDLL(None, use_errno=True)
        flags = os.O_CLOEXEC | os.O_NONBLOCK | (0 if gate is not None else _USER_MODE_ONLY)
        self._descriptor = libc.syscall(number, flags)
        if self._descriptor < 0:
            pytest.skip(f"userfaultfd: {os.strerror(ctypes.get_errno())}")
        self._gate = gate
        self._step = mmap.PAGESIZE
        count = -(-len(content) // self._step)
        self._content = content.ljust(count * self._step, b"\0")
        self._memory = mmap.mmap(-1, len(self._content), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view = ctypes.c_char.from_buffer(self._memory)
        self.address = ctypes.addressof(view)
        self.touched: Counter[int] = Counter()
        fcntl.ioctl(self._descriptor, _API, struct.pack("QQQ", 0xAA, 0, 0))
        area = struct.pack("QQQQ", self.address, len(self._content), _MISSING, 0)
        fcntl.ioctl(self._descriptor, _REGISTER, area)
        self._wake, self._stop = os.pipe()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._gate is not None:
            self._gate.set()
        os.write(self._stop, b"x")
        self._thread.join()
        for descriptor in (self._wake, self._stop, self._descriptor):
            os.close(descriptor)

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(self._descriptor, select.POLLIN)
        there: list[int] = []
        if self._gate is not None:
            self._gate.wait()
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._wake in ready:
                return
            event, at = struct.unpack_from("B15xQ", os.read(self._descriptor, _MESSAGE_BYTES))
            assert event == _EVENT_FAULT
            page = (at - self.address) // self._step
            self.touched[page] += 1
            there.append(page)
            for old in there[:-_KEPT]:
                self._memory.madvise(mmap.MADV_DONTNEED, old * self._step, self._step)
            del there[:-_KEPT]
            source = ctypes.create_string_buffer(self._content[page * self._step :][: self._step])
            start = self.address + page * self._step
            copy = struct.pack("QQQQq", start, ctypes.addressof(source), self._step, 0, 0)
            fcntl.ioctl(self._descriptor, _COPY, copy)
