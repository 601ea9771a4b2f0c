"""Goal: memory that cannot be touched is an error, in the process of an engine too."""

import subprocess
import sys

import pytest

from kvstore import mover

READ_ONLY = """
import os
from kvstore import mover
from kvstore.mover.memory import map_shared
from kvstore.protocol.errors import TierUnavailable

size = 1 << 20
memory = os.memfd_create("extent")
os.ftruncate(memory, size)
address = map_shared(memory, size, write=False)
mover.populate(address, size, write=False)
try:
    mover.populate(address, size, write=True)
except TierUnavailable as error:
    print(error)
"""


def test_populate_to_write_where_only_reading_is_allowed_is_an_error() -> None:
    """It was taken for an old kernel's answer, and a write ended the engine: SIGSEGV."""
    if not mover.is_native:
        pytest.skip("the fallback touches memory; it cannot ask")
    run = subprocess.run(
        [sys.executable, "-c", READ_ONLY], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stdout) == (0, "1048576 bytes of memory: Permission denied\n")
