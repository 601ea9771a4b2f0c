"""How much code must be read to follow a page, and how many packages import each other?

``path`` counts the functions that run when an embedded store puts, looks up and restores pages in
memory: their files, and their lines without docstrings, comments and blanks. ``rooms`` counts pairs
of rooms of ``kvstore`` with an import between them: a room is a folder, or a module, right below
the package; the package's own ``__init__``, which only names what users import, is none. ``order``
counts the lines of the reading order that ``docs/architecture.md`` gives.
"""

import argparse
import ast
import json
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

import numpy as np

from kvstore import CanonicalLayout, KVPool, KVStore, ShardSpec, SpaceIdentity

ROOT: Final = Path(__file__).resolve().parent.parent
PAGES: Final = 4
PAGE_TOKENS: Final = 16
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def add_arguments(_parser: argparse.ArgumentParser) -> None:
    """There are none of its own."""


def run(options: argparse.Namespace) -> int:
    """Count, and print."""
    path, pairs = code_lines(functions_that_run()), room_pairs()
    counted = {
        "path_files": len(path),
        "path_lines": sum(path.values()),
        "rooms": len({room for pair in pairs for room in pair}),
        "room_pairs": len(pairs),
        "order_lines": sum(len(file.read_text().splitlines()) for file in reading_order()),
    }
    if options.json:
        sys.stdout.write(json.dumps({**counted, "path": path, "pairs": sorted(pairs)}) + "\n")
        return 0
    for name, value in counted.items():
        sys.stdout.write(f"{name:12} {value:6,}\n")
    for name, lines in sorted(path.items()):
        sys.stdout.write(f"  {name:44} {lines:5}\n")
    return 0


def functions_that_run() -> set[CodeType]:
    """Code objects that are called by put, lookup and restore, on this thread and the store's."""
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            seen.add(frame.f_code)

    identity = SpaceIdentity(model="m", kv_dtype="uint8", page_tokens=PAGE_TOKENS)
    spec = ShardSpec(layout=CanonicalLayout(head_dim=128), layers=(0, 2), heads=(0, 1))
    threading.setprofile(note)  # of the threads that the store will start
    with KVStore.open(8 << 20, extent_bytes=4 << 20) as store:
        space = store.space(identity, [spec])
        size = space.page_bytes[0]
        pages = [np.full(size, 7, np.uint8)] * PAGES
        blocks = np.zeros((4, PAGES, size // 4), np.uint8)
        addresses = tuple(block.ctypes.data for block in blocks)
        pool = KVPool(addresses, size // 4, size // 4, PAGES)
        before = sys.getprofile()
        seen.clear()
        sys.setprofile(note)
        try:
            keys = space.page_keys(list(range(PAGE_TOKENS * PAGES)))
            stored = space.put(keys, pages)
            hit = space.lookup(keys)
            restored = space.restore_to_kvpool(keys, pool, np.arange(PAGES)).result(10)
        finally:
            sys.setprofile(before)
            threading.setprofile(None)
    assert stored.stored == hit.pages == restored.pages == PAGES
    return seen


def code_lines(codes: set[CodeType]) -> dict[str, int]:
    """File of ``kvstore`` → code lines of those of its functions that are among ``codes``."""
    found: dict[str, int] = {}
    for path in sorted((ROOT / "kvstore").rglob("*.py")):
        first = {(one.co_name, one.co_firstlineno) for one in codes if one.co_filename == str(path)}
        if not first:
            continue
        text = path.read_text()
        tree = ast.parse(text)
        lines: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, _Function):
                start = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                if (node.name, start) in first:
                    lines |= set(range(start, (node.end_lineno or start) + 1))
        counted = lines - _docstrings(tree)
        source = text.splitlines()
        lines_of_code = [at for at in counted if not re.match(r"\s*(#.*)?$", source[at - 1])]
        if lines_of_code:
            found[path.relative_to(ROOT).as_posix()] = len(lines_of_code)
    return found


def _docstrings(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | _Function) or not node.body:
            continue
        head = node.body[0]
        if isinstance(head, ast.Expr) and isinstance(head.value, ast.Constant):
            lines |= set(range(head.lineno, (head.end_lineno or head.lineno) + 1))
    return lines


def room_pairs() -> set[tuple[str, str]]:
    """(room, room it imports from) of ``kvstore``."""
    modules = {_name(path): path for path in (ROOT / "kvstore").rglob("*.py")}
    pairs = set()
    for name, path in modules.items():
        for target in _imports(ast.parse(path.read_text())):
            while target and target not in modules:
                target = target.rpartition(".")[0]
            rooms = _room(name), _room(target)
            if all(rooms) and rooms[0] != rooms[1]:
                pairs.add(rooms)
    return pairs


def reading_order() -> list[Path]:
    """The files that the architecture page lists as reading order, up to the first semicolon."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    way = text[text.index("Reading order:") :].partition(";")[0]
    return [ROOT / "kvstore" / name for name in re.findall(r"`([\w/]+\.py)`", way)]


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _room(module: str) -> str:
    """The part of a module's name below the package; empty for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvstore"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
