"""One Mooncake engine of a node, over any number of processes one after another."""

import logging
from typing import Final

from kvstore.transport.engine_messages import MemoryMapped, StartEngine
from kvstore.transport.engine_process import EngineProcess
from kvstore.transport.regions import Regions

START_S: Final = 20.0
"""From the start of a process to its first message."""
RESTART_S: Final = 0.5
"""Between two attempts to start a process that could not be started, or ended before it was up."""
_log: Final = logging.getLogger(__name__)


class MooncakeEngine:
    """One of the two engines, over any number of processes.

    Attributes:
        process: the present one; None = it could not be started, or has ended.
        endpoint: of the engine, once it is ready; empty before.
        memory: registered memory, at the node and there.
        huge: where it begins at the node → its bytes in huge pages.
        registering: serials of the registrations that a new process must have answered before it
            is given transfers.
        start_ns: when another process may be started, or the present one must be ready.
        ending: the present process is being killed.
        pause_ns: until another one is started after the last one; 0 = that was up, with its memory.
    """

    def __init__(self, start: StartEngine) -> None:
        self._start = start
        self.process: EngineProcess | None = None
        self.endpoint = ""
        self.memory = Regions()
        self.huge: dict[int, int] = {}
        self.registering: set[int] = set()
        self.start_ns = 0
        self.ending = False
        self.pause_ns = 0

    def begin(self, now_ns: int) -> None:
        """Start a process."""
        try:
            self.process = EngineProcess(self._start)
        except OSError as error:
            _log.warning("a Mooncake process cannot be started: %s", error)
            self.start_ns = now_ns + int(RESTART_S * 1e9)
            return
        self.start_ns = now_ns + int(START_S * 1e9)

    def ready(self, port: int) -> None:
        """It listens."""
        host = self._start.host
        self.endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def mapped(self, message: MemoryMapped, length: int) -> None:
        """It has registered memory, or not."""
        if message.address:
            self.memory.add(message.start, length, message.address)
            self.huge[message.start] = message.huge_bytes
        else:
            _log.warning("Mooncake did not register memory: pages there go over tcp")

    def forget(self, start: int) -> None:
        """Memory goes."""
        self.memory.remove(start)
        self.huge.pop(start, None)

    def end(self, until_s: float) -> bool:
        """Kill the process; returns whether it has ended for certain."""
        if self.process is not None and not self.process.close(until_s):
            return False
        was_up = self.endpoint and not self.registering
        self.pause_ns = 0 if was_up else int(RESTART_S * 1e9)
        self.process, self.endpoint, self.ending = None, "", False
        self.memory, self.huge, self.registering = Regions(), {}, set()
        return True
