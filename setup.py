"""Builds the native copier; everything else is in pyproject.toml.

The library is plain C called through ctypes (it includes no Python.h). Without a compiler the
install still succeeds and ``kvstore.mover`` falls back to numpy, which the daemon reports.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "kvstore.mover._mover",
            ["kvstore/mover/_mover.c"],
            depends=["kvstore/mover/_xxh3.h"],
            extra_compile_args=["-O3", "-std=c11", "-fvisibility=hidden", "-Wall", "-Wextra"],
            optional=True,
        )
    ]
)
