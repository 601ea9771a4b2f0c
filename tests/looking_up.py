"""An engine beside a fuzzer: how long does its node let it wait?"""

import json
import subprocess
import sys
from typing import Any, Final

_TIMEOUT_S: Final = 30.0


class LookingUp:
    """:mod:`kvstore.testing.lookups` in a process of its own.

    Args:
        address: of the node's socket.
        pid: of the node.
    """

    def __init__(self, address: str, pid: int) -> None:
        words = ["-m", "kvstore.testing.lookups", address, str(pid)]
        self._child = subprocess.Popen(
            [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._child.stdout is not None
        assert self._child.stdout.readline() == b"ready\n"

    def waits(self) -> dict[str, Any]:
        """What it saw; it ends."""
        told, _ = self._child.communicate(b"\n", _TIMEOUT_S)
        found: dict[str, Any] = json.loads(told)
        return found
