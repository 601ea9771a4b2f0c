"""Goal: each package names what the other packages of the product may import, and no more.

``__all__`` in a package's ``__init__.py`` has the names that users or other packages import from
the package itself, and those of its modules that other packages import. Everything else is the
package's own. ``kvstore.testing``, ``bench`` and the tests look inside: they do not count.
"""

import ast
import importlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_tidy import (
    PACKAGES,
    PRODUCT,
    ROOT,
    large_trees,
    python_files,
    refuse,
    tree_of,
    walk,
)

__all__ = ["large_trees"]  # what pytest finds here
pytestmark = pytest.mark.usefixtures("large_trees")

INSIDERS = {"kvstore.testing"}


def module_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {module_of(path) for path in python_files(*PRODUCT)} - PACKAGES


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """(package, name or module of it) of all that a file imports of the product."""
    for node in walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            parent = node.module in PACKAGES
            found = [
                f"{node.module}.{alias.name}" if parent else node.module for alias in node.names
            ]
        else:
            continue
        for one in found:
            package, _, name = one.rpartition(".")
            if package in PACKAGES and one not in PACKAGES:
                yield package, name


def test_each_package_names_what_other_packages_import_of_it():
    used: dict[str, set[str]] = defaultdict(set)
    for path in python_files(*PRODUCT):
        inside = ".".join(path.parent.relative_to(ROOT).parts)
        for package, name in imported(path):
            if inside not in INSIDERS | {package}:
                used[package].add(name)

    faults = []
    for package in sorted(PACKAGES):
        found = importlib.import_module(package)
        shown = set(getattr(found, "__all__", ["__all__"]))
        own = {name for name in shown if f"{package}.{name}" not in MODULES}
        faults += [f"{package}: {name} is missing" for name in sorted(used[package] - shown)]
        faults += [
            f"{package}: {name} is not needed" for name in sorted(shown - own - used[package])
        ]
        if not hasattr(found, "__getattr__"):  # else it imports what is asked for
            faults += [f"{package}: no {name}" for name in sorted(own) if not hasattr(found, name)]
    refuse(faults, "__all__ is what other packages may import; use what is named, or extend it")
