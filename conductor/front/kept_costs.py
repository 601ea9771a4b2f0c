"""Keeps what was measured of the engines in a file, so that a restart begins with it.

The file is replaced as a whole, so that it is never half written. One that cannot be used is left
where it is, counted and logged, and the Conductor begins with estimates; the next write replaces
it.
"""

import asyncio
import logging
import os
from pathlib import Path
from typing import Final

from conductor.costs.book import CostBook, UnusableCostsError
from conductor.front.rotation import refuse_no_file
from kvstore.protocol.errors import reason

PERIOD_S: Final = 60.0
"""Seconds between two writes."""
_BYTES_MAX: Final = 16 << 20

_log = logging.getLogger(__name__)


class KeptCosts:
    """The file.

    Args:
        path: of the file; empty = nothing is kept.
        book: what is kept.

    Attributes:
        faults: times that it could not be read or written.
    """

    def __init__(self, path: str, book: CostBook) -> None:
        self._path = Path(path) if path else None
        self._book = book
        self.faults = 0

    def read(self) -> None:
        """Fill the book with what the file has, if there is one that can be used."""
        if self._path is None:
            return
        try:
            refuse_no_file(self._path)
            with self._path.open("rb") as file:
                data = file.read(_BYTES_MAX + 1)
            if len(data) > _BYTES_MAX:
                raise UnusableCostsError(f"it has more than {_BYTES_MAX} bytes")
            self._book.load(data)
        except FileNotFoundError:
            return
        except (OSError, UnusableCostsError) as error:
            why = reason(error) if isinstance(error, OSError) else str(error)
            self._fault(f"costs.file={self._path} is not used, costs are estimated: {why}")

    async def run(self) -> None:
        """Write every now and then, until cancelled."""
        while self._path is not None:
            await asyncio.sleep(PERIOD_S)
            data = self._book.dump()
            try:
                await asyncio.to_thread(self._write, self._path, data)
            except RuntimeError as error:  # no thread can be started
                self._fault(f"costs.file={self._path} cannot be written now: {error}")

    def write(self) -> None:
        """Write now."""
        if self._path is not None:
            self._write(self._path, self._book.dump())

    def _write(self, path: Path, data: bytes) -> None:
        draft = path.with_name(f"{path.name}.new")
        try:
            refuse_no_file(path)
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except OSError as error:
            self._fault(f"costs.file={path} cannot be written: {reason(error)}")

    def _fault(self, message: str) -> None:
        self.faults += 1
        _log.warning(message)
