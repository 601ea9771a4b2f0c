"""The library that is built from ``_mover.c``, ``_chains.c``, ``_ranges.c`` and ``_table.c``."""

import ctypes
import sysconfig
from pathlib import Path
from typing import Final

VERSION: Final = 5
"""Of the library's interface, as in ``_mover.c``; others are not used."""
LIBRARY: Final = Path(__file__).with_name(f"_mover{sysconfig.get_config_var('EXT_SUFFIX')}")
"""Path of the library that ``pip install`` builds if there is a compiler."""


def load(path: Path) -> ctypes.CDLL | None:
    """The built library; None if there is none of this version."""
    try:
        library = ctypes.CDLL(str(path))
        return library if library.kv_version() == VERSION else None
    except (OSError, AttributeError):
        return None
