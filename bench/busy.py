"""A busy interpreter: what a store meets inside an engine's process."""

import threading
from types import TracebackType
from typing import Self

from bench.measure import Measured


class BusyThread:
    """Another thread of this process that runs Python whenever a case asks for company.

    A context manager: the thread lives inside the block.
    """

    def __init__(self) -> None:
        self._spin = False
        self._ending = False
        self._go = threading.Event()
        self._spinning = threading.Event()
        self._resting = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bench-busy")

    def beside(self, case: Measured) -> Measured:
        """The same case, measured while the thread runs; it rests before and after."""

        def measured() -> float:
            self._resting.clear()
            self._spin = True
            self._go.set()
            self._spinning.wait()
            try:
                return case()
            finally:
                self._spin = False
                self._resting.wait()

        return measured

    def _run(self) -> None:
        while True:
            self._go.wait()
            self._go.clear()
            if self._ending:
                return
            self._spinning.set()
            turns = 0
            while self._spin:
                turns += 1
            self._spinning.clear()
            self._resting.set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ending = True
        self._go.set()
        self._thread.join()
