"""Goal: the core is compiled where that is asked for, all of it, and nowhere else."""

import ast
import os
from importlib import import_module
from importlib.machinery import ExtensionFileLoader, SourceFileLoader
from pathlib import Path

import msgspec
import pytest

from kvstore.node.describe import core
from kvstore.node.node import Node
from kvstore.server.admin.openapi import described
from kvstore.server.admin.routes import ROUTES

ROOT = Path(__file__).resolve().parent.parent.parent
INTERPRETED = {
    "kvstore/node/ssd.py": "it moves bytes, and a turn costs it little beside the disk's threads",
    "kvstore/state/ask/explain.py": "operators ask it, one page at a time",
    "kvstore/protocol/page.py": "its messages say in class keywords how they are packed",
    "kvstore/protocol/wire.py": "its messages say in class keywords how they are packed",
}
"""Pure modules, and modules beside them, that mypyc does not compile, and why."""
SOURCES = [
    path.relative_to(ROOT)
    for path in [*ROOT.glob("kvstore/state/**/*.py"), *ROOT.glob("kvstore/node/*.py")]
    if path.name != "__init__.py" and path.relative_to(ROOT).as_posix() not in INTERPRETED
]
ASKED = os.environ.get("TESTED_CORE", "pure")


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_each_module_of_the_core_runs_as_it_was_asked_for(path: Path) -> None:
    module = import_module(".".join(path.with_suffix("").parts))
    wanted = ExtensionFileLoader if ASKED == "compiled" else SourceFileLoader
    assert isinstance(module.__loader__, wanted)


def test_the_core_says_what_it_is_and_its_code_is_that() -> None:
    assert core() == ASKED
    assert hasattr(Node.receive, "__code__") == (ASKED == "pure")


def test_the_admin_api_can_be_described_with_this_core() -> None:
    """Of what an annotation says mypyc keeps a class at most, ``list`` of ``list[int]``."""
    described_by = msgspec.json.encode(described(ROUTES))
    assert b"hit_pages" in described_by


def test_nothing_compiled_lies_beside_the_sources() -> None:
    """Python would take it for the source, however old it is."""
    found = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("kvstore/**/*.so")}
    assert {path for path in found if not path.startswith("kvstore/mover/_mover.")} == set()


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_no_class_of_the_core_has_keywords(path: Path) -> None:
    """Mypyc leaves them out, and says nothing: a message would be packed in another form."""
    classes = [node for node in ast.walk(ast.parse((ROOT / path).read_text()))
               if isinstance(node, ast.ClassDef)]  # fmt: skip
    assert [one.name for one in classes if one.keywords] == []


@pytest.mark.parametrize("path", sorted(INTERPRETED))
def test_what_is_not_compiled_is_there(path: str) -> None:
    assert (ROOT / path).is_file(), "its entry can go"
