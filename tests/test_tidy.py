"""Rules of this code base that no linter knows, as tests over the files of the tree.

CONTRIBUTING.md gives the reasons. A rule that stands in the way of better code is broken openly:
with an entry and its reason in one of the tables below.
"""

import ast
import gc
import importlib
import os
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.catch_all import CATCH_ALL

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = set(PYPROJECT["tool"]["setuptools"]["packages"])
PRODUCT = sorted({name.partition(".")[0] for name in PACKAGES})

CODE_LINES_MAX = 350
"""Lines without docstrings, comments and blanks, and without the product's assertions: nobody cuts
an explanation to meet it, or leaves out what would find a mistake."""
C_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
BASES_MAX = 2
BANNED_FILE_NAMES = re.compile(r"(utils?|helpers?|common|misc|base_.*|.*_v\d+|v\d+|new_.*)\.py")
ENVIRONMENT_READERS = {
    "kvstore/config/__init__.py", "kvstore/server/environment.py", "conductor/config.py",
    "kvstore/server/notify.py",  # what a service manager says there is no setting
    "engine_adapters/vllm/plugin.py",  # a secret that vLLM's processes inherit
}  # fmt: skip
WORKPLACE = ("/work/", ".library")

LONG_FILES: dict[str, int] = {}
"""path: the code lines that it had when this limit came; it may shrink, and then goes from here."""
LONG_FUNCTIONS: dict[str, str] = {}
"""``path:function``: why it is longer."""

OTHER_TEST_FOLDERS = {
    "cluster_processes": "several nodes as processes, and real servers: `make test-cluster`",
    "crash": "kills and power cuts, of the whole node",
    "deploy": "the files of deploy/, which is no package",
    "docs": "what the documentation says and shows",
    "e2e": "the whole system",
    "faults": "engines and nodes that end or stop, seen from the other side",
    "fuzz": "whatever is sent to a node, through all of its rooms",
    "mutants": "whether tests notice faults",
    "vllm": "real engines, in an environment of their own: `make test-vllm`",
}
"""Folders of tests that are of no room of the product: why."""


# The tree

_BUILT = {"build", "dist", "__pycache__"}


@cache
def files() -> tuple[Path, ...]:
    """Every file of the project that people write: no hidden, built or installed ones."""
    found: list[Path] = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [
            name
            for name in folders
            if name == ".ci" or not (name.startswith(".") or name in _BUILT or "egg-info" in name)
        ]
        names = [name for name in names if not name.endswith((".so", ".pyc"))]
        found += [Path(folder, name) for name in names if name != ".git"]  # of a worktree
    return tuple(sorted(found))


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def python_files(*tops: str) -> list[Path]:
    """Python files of the tree, or of some top folders of it."""
    return [
        path
        for path in files()
        if path.suffix == ".py" and (not tops or path.relative_to(ROOT).parts[0] in tops)
    ]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@pytest.fixture(scope="module")
def large_trees() -> Iterator[None]:
    """They are let go at the end, and until then no garbage collection walks over them."""
    gc.disable()
    yield
    tree_of.cache_clear()
    gc.enable()


pytestmark = pytest.mark.usefixtures("large_trees")


Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function


def children(node: ast.AST) -> list[ast.AST]:
    """As ``ast.iter_child_nodes``, and faster, without contexts and operators."""
    found: list[ast.AST] = []
    for field in node._fields:
        value = getattr(node, field, None)
        if isinstance(value, list):
            found += [one for one in value if isinstance(one, ast.AST)]
        elif isinstance(value, ast.AST) and value._fields:
            found.append(value)
    return found


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """The node and all below it, except those without content: ``ast.Load()``, operators."""
    left = [node]
    while left:
        node = left.pop()
        yield node
        left += children(node)


def nodes(path: Path) -> Iterator[tuple[ast.AST, str]]:
    """Every node with the dotted name of the function or class it is in."""
    within: list[tuple[ast.AST, str]] = [(tree_of(path), "")]
    while within:
        node, name = within.pop()
        for child in children(node):
            inner = name
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = f"{name}.{child.name}".lstrip(".")
            yield child, inner
            within.append((child, inner))


def dotted(node: ast.expr) -> str:
    """``a.b.c`` for a chain of attributes; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""


def full_names(path: Path) -> dict[str, str]:
    """What the names imported in a file stand for: ``sleep`` → ``time.sleep``, ``t`` → ``time``."""
    names: dict[str, str] = {}
    for node, _ in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        if isinstance(node, ast.ImportFrom):
            names |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    return names


def resolved(node: ast.expr, names: dict[str, str]) -> str:
    head, dot, rest = dotted(node).partition(".")
    return names.get(head, head) + dot + rest


def refuse(faults: list[str], advice: str) -> None:
    assert not faults, advice + "\n  " + "\n  ".join(faults)


# Size and shape


def test_the_walk_sees_the_whole_project():
    seen = {shown(path) for path in files()}

    assert {"kvstore/protocol/page.py", "tests/test_tidy.py", "pyproject.toml", ".ci/run"} <= seen
    assert not [path for path in seen if path.startswith((".venv", ".git/"))]


def test_no_file_is_too_long_to_read():
    faults = []
    for path in python_files():
        count, most = code_lines(path), LONG_FILES.get(shown(path), CODE_LINES_MAX)
        if count > most:
            faults.append(f"{shown(path)}: {count} code lines, {most} at most")
        elif count <= CODE_LINES_MAX < most:
            faults.append(f"{shown(path)}: {count} code lines: take it out of LONG_FILES")

    faults += [
        f"{shown(path)}: {count} lines"
        for path in files()
        if path.suffix == ".c" and (count := len(path.read_text().splitlines())) > C_LINES_MAX
    ]
    refuse(faults, "too much code: find the second thing in the file, move it")


def code_lines(path: Path) -> int:
    """Lines that are no docstring, comment, blank or, in the product, assertion."""
    prose: set[int] = set()
    product = path.relative_to(ROOT).parts[0] in PRODUCT
    for node in walk(tree_of(path)):
        if isinstance(node, ast.Assert) and product:
            prose |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if isinstance(node, Documented) and node.body:
            head = node.body[0]
            if isinstance(head, ast.Expr) and isinstance(head.value, ast.Constant):
                prose |= set(range(head.lineno, (head.end_lineno or head.lineno) + 1))
    lines = enumerate(path.read_text().splitlines(), start=1)
    return sum(at not in prose and not re.match(r"\s*(#.*)?$", line) for at, line in lines)


def test_no_two_classes_of_a_package_have_one_name():
    faults: list[str] = []
    for package in PRODUCT:
        places: dict[str, list[str]] = {}
        for path in python_files(package):
            for node in tree_of(path).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(shown(path))
        faults += [f"{name}: {', '.join(where)}" for name, where in places.items() if where[1:]]

    refuse(faults, "one word, one thing: find a name for the second")


def test_no_room_is_empty():
    rooms = {path.parent for path in python_files(*PRODUCT)}
    faults = [
        shown(room)
        for room in rooms
        if not [path for path in room.iterdir() if path.suffix == ".py" and path.name[0] != "_"]
        and not list(room.glob("*/__init__.py"))
        and not (room / "__init__.py").read_text().count("\n") > 5
    ]
    refuse(faults, "a room with nothing in it: take it out")


def test_tests_lie_where_what_they_test_lies():
    tests = ROOT / "tests"
    folders = {path.parent for path in python_files("tests") if path.name.startswith("test_")}
    tops = {*PRODUCT, "bench"} - {"kvstore"}
    faults = []
    for folder in sorted(folders - {tests}):
        place = folder.relative_to(tests)
        room = (ROOT if place.parts[0] in tops else ROOT / "kvstore") / place
        if not (room.is_dir() or room.with_suffix(".py").exists()):
            faults.append(place.as_posix())

    refuse(
        sorted(set(faults) ^ OTHER_TEST_FOLDERS.keys()),
        "put tests in the folder of their room (tests/tier/ssd for kvstore/tier/ssd.py), or say in"
        " OTHER_TEST_FOLDERS why these are of no room; take out what is not needed there",
    )


def test_no_function_is_too_long_to_see_at_once():
    faults = []
    for path in python_files():
        for node, name in nodes(path):
            if not isinstance(node, Function) or f"{shown(path)}:{name}" in LONG_FUNCTIONS:
                continue
            count = (node.end_lineno or node.lineno) - node.lineno + 1
            if count > FUNCTION_LINES_MAX:
                faults.append(f"{shown(path)}:{node.lineno} {name}: {count} lines")

    refuse(faults, f"more than {FUNCTION_LINES_MAX} lines: give its steps names")


def test_classes_have_few_bases_and_no_mixins():
    faults = []
    for path in python_files():
        for node, name in nodes(path):
            if not isinstance(node, ast.ClassDef):
                continue
            if len(node.bases) > BASES_MAX:
                faults.append(f"{shown(path)}:{node.lineno} {name} has {len(node.bases)} bases")
            bases = [dotted(base).rpartition(".")[2] for base in node.bases]
            if any(part.lower().endswith("mixin") for part in (node.name, *bases)):
                faults.append(f"{shown(path)}:{node.lineno} {name} is or has a mixin")

    refuse(faults, "compose: a mixin moves text, not coupling")


def test_files_are_named_after_things():
    faults = [shown(path) for path in python_files() if BANNED_FILE_NAMES.fullmatch(path.name)]

    refuse(faults, "name the file after what is in it")


# Behaviour


def test_only_the_configuration_reads_the_environment():
    faults = []
    readers = {"os.environ", "os.environb", "os.getenv", "os.getenvb"}
    for path in python_files(*PRODUCT):
        if shown(path) in ENVIRONMENT_READERS:
            continue
        names = full_names(path)
        faults += [
            f"{shown(path)}:{node.lineno} {resolved(node, names)}"
            for node, _ in nodes(path)
            if isinstance(node, (ast.Attribute, ast.Name)) and resolved(node, names) in readers
        ]

    refuse(faults, f"pass the value down from one of {', '.join(sorted(ENVIRONMENT_READERS))}")


def test_nothing_swallows_every_exception():
    faults = []
    for path in python_files(*PRODUCT, "bench"):
        for node, name in nodes(path):
            if not isinstance(node, ast.ExceptHandler) or f"{shown(path)}:{name}" in CATCH_ALL:
                continue
            reraises = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            if catches_everything(node) and not reraises:
                faults.append(f"{shown(path)}:{node.lineno} in {name or 'the module'}")

    refuse(faults, "name the errors that can happen, or let them go up")


def catches_everything(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(dotted(kind) in {"Exception", "BaseException"} for kind in kinds)


def test_no_test_sleeps():
    faults = []
    for path in python_files("tests"):
        names = full_names(path)
        for node, _ in nodes(path):
            if not isinstance(node, ast.Call):
                continue
            called = resolved(node.func, names)
            yields = (
                called == "asyncio.sleep"
                and node.args
                and isinstance(node.args[0], ast.Constant)
                and node.args[0].value == 0
            )
            if called in {"time.sleep", "asyncio.sleep"} and not yields:
                faults.append(f"{shown(path)}:{node.lineno} {called}")

    refuse(faults, "wait for the condition, with a deadline: see wait_until in tests/conftest.py")


def test_every_exception_from_a_rule_is_still_needed():
    functions = {
        f"{shown(path)}:{name}"
        for path in python_files()
        for node, name in nodes(path)
        if isinstance(node, Function)
    }
    paths = {shown(path) for path in files()}

    faults = sorted((set(LONG_FUNCTIONS) | set(CATCH_ALL)) - functions)
    faults += sorted((set(LONG_FILES) | ENVIRONMENT_READERS) - paths)

    refuse(faults, "these are exceptions for what does not exist; take them out")


# Words and links


def test_what_every_adapter_shares_names_no_engine():
    room = [path for path in python_files("kvstore") if path.parent.name == "engine"]
    named = [shown(path) for path in room if re.search("vllm|sglang", path.read_text().lower())]
    assert room
    refuse(named, "what one engine calls or does belongs to its adapter")


def test_nothing_mentions_the_place_it_was_written_in():
    faults = []
    for path in set(files()) - {Path(__file__).resolve()}:
        text = path.read_text(errors="replace")
        for number, line in enumerate(text.splitlines(), start=1):
            faults += [f"{shown(path)}:{number} {word}" for word in WORKPLACE if word in line]

    refuse(sorted(faults), "paths of one machine mean nothing on another")


LINK = re.compile(
    r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)"  # [text](target "title")
    r"|^\[[^\]]+\]:\s*<?(\S+?)>?\s*$",  # [name]: target
    re.MULTILINE,
)
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("a [b](c.md) d ![e](f.png)", ["c.md", "f.png"]),
        ("[a](b.md#part) [c](<d.md>) [e](f.md 'title')", ["b.md#part", "d.md", "f.md"]),
        ("[a]\n\n[a]: b.md\n", ["b.md"]),
        ("```\n[a](b.md)\n```\n[c](d.md)", ["d.md"]),
    ],
)
def test_links_of_every_form_are_found(text, targets):
    assert links(text) == targets


def links(markdown: str) -> list[str]:
    prose = FENCE.sub("", markdown)
    return [inline or reference for inline, reference in LINK.findall(prose)]


def test_every_link_to_a_local_file_leads_somewhere():
    faults = []
    for path in files():
        if path.suffix != ".md":
            continue
        for target in links(path.read_text()):
            name = target.partition("#")[0]
            remote = re.match(r"[a-z][a-z0-9+.-]*:", target)
            if name and not remote and not (path.parent / name).exists():
                faults.append(f"{shown(path)} → {target}")

    refuse(faults, "these links lead nowhere")


# Packaging


@pytest.mark.parametrize(("script", "target"), sorted(PYPROJECT["project"]["scripts"].items()))
def test_every_console_script_has_something_to_call(script, target):
    module, _, attribute = target.partition(":")

    assert callable(getattr(importlib.import_module(module), attribute)), f"{script} = {target}"


def test_the_packages_that_are_installed_are_those_of_the_tree():
    in_tree = {".".join(path.parent.relative_to(ROOT).parts) for path in python_files(*PRODUCT)}

    assert in_tree == PACKAGES, (
        "pyproject.toml [tool.setuptools] packages: "
        f"missing {sorted(in_tree - PACKAGES)}, of no file {sorted(PACKAGES - in_tree)}"
    )


def test_every_package_says_what_it_is():
    faults = []
    for name in sorted(PACKAGES):
        start = ROOT / name.replace(".", "/") / "__init__.py"
        if not start.exists() or not ast.get_docstring(tree_of(start)):
            faults.append(f"{shown(start)}: {'no docstring' if start.exists() else 'missing'}")

    refuse(faults, "a package is a noun of the field; its __init__.py says which")
