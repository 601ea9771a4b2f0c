"""Builds the native copier and, with ``KVSTORE_COMPILE=1``, the compiled core.

Everything else is in pyproject.toml. The copier is plain C called through ctypes (it includes no
Python.h). Without a compiler the install still succeeds and ``kvstore.mover`` falls back to numpy,
which the daemon reports.

The core are the modules that decide. mypyc compiles them from the same sources; nothing is left
out if that fails. Who only installs needs neither mypy nor the wait (docs/decisions/0015).
"""

import os
from pathlib import Path

from setuptools import Extension, setup

COMPILED = os.environ.get("KVSTORE_COMPILE") == "1"
BUILD = Path("build", "compiled")
"""Of its own: setuptools puts all that it finds in a build folder into the wheel."""
INTERPRETED = ("__init__.py", "explain.py", "ssd.py")
"""What is not compiled; decisions/0015 says why."""
CORE = [
    path
    for folder in ("state", "node")
    for path in Path("kvstore", folder).rglob("*.py")
    if path.name not in INTERPRETED
]
TYPES = f"""
[mypy]
cache_dir = {BUILD}/mypy
follow_imports = skip
[mypy-kvstore.*,msgspec.*,numpy.*]
follow_imports = normal
[mypy-kvstore]
follow_imports = skip
"""
"""Whose types the compiler reads; ``kvstore/__init__.py`` would lead to all there are, torch's too.

What is not read counts as ``Any``, which is slower, not wrong."""

MOVER = Extension(
    "kvstore.mover._mover",
    [
        "kvstore/mover/_mover.c",
        "kvstore/mover/_chains.c",
        "kvstore/mover/_ranges.c",
        "kvstore/mover/_table.c",
    ],
    depends=["kvstore/mover/_pages.h", "kvstore/mover/_xxh3.h"],
    extra_compile_args=["-O3", "-std=c11", "-fvisibility=hidden", "-Wall", "-Wextra"],
    optional=True,
)


def compiled_core() -> list[Extension]:
    """One library with all modules of the core, and for each of them a stub that Python finds."""
    from mypyc.build import mypycify  # who does not compile need not have it

    BUILD.mkdir(parents=True, exist_ok=True)
    types = BUILD / "mypy.ini"
    types.write_text(TYPES)
    found = mypycify(
        [f"--config-file={types}", *sorted(map(str, CORE))],
        group_name="kvstore.core",
        opt_level="2",
        debug_level="0",
        target_dir=str(BUILD / "c"),
    )
    for one in found:  # else another library might replace each function: no call is inlined then
        one.extra_compile_args.append("-fvisibility=hidden")
    return found


setup(
    ext_modules=[MOVER, *(compiled_core() if COMPILED else [])],
    options={"build": {"build_base": str(BUILD)}} if COMPILED else {},
)
