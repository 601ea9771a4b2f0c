"""Goal: the product defines nothing that nobody uses, or only its tests do.

A name of a module is used where a file of the product loads or imports it, a method where anything
calls a method of that name, and data of an object where anything reads an attribute of that name.
So what shares its name with something that is used, as ``get`` and ``check``, is not found.
"""

import ast
import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.test_tidy import (
    PRODUCT,
    PYPROJECT,
    ROOT,
    Function,
    dotted,
    files,
    full_names,
    large_trees,
    python_files,
    refuse,
    resolved,
    shown,
    tree_of,
    walk,
)

__all__ = ["large_trees"]  # what pytest finds here
pytestmark = pytest.mark.usefixtures("large_trees")

_PRINTED = "printed as JSON: docs/performance.md"
CALLED_BY_OTHERS: dict[str, str] = {
    "engine_adapters/vllm/tier.py:KVStoreTier": "vLLM finds it by its name: docs/engines/vllm.md",
    "kvstore/handoff/prefill.py:Sender.send_state": "engines with state data: docs/handoff.md",
    "kvstore/tier/push_memory.py:PushMemory": "engines with KV on a device: docs/handoff.md",
    "kvstore/server/metrics.py:render_slab": "for an engine's exporter: docs/operations/metrics.md",
    "kvstore/protocol/explanation.py:Explanation.asked_pages": "in the JSON of explain",
    "kvstore/testing/lookups.py:Waits.half_s": _PRINTED,
    "kvstore/testing/lookups.py:Waits.worst_s": _PRINTED,
}
"""``path:name`` → who uses it, where neither the product nor a document does."""
OWN_ROOTS = {*PRODUCT, "typing", "msgspec", "enum", "collections"}
"""Classes of other packages call what their subclasses define."""
OURS = re.compile("^(CHANGELOG|CONTRIBUTING|docs/(architecture|glossary|internals|decisions))")
"""Documents that say how it is made."""
ENCODED = {"msgspec.Struct", "typing.TypedDict", "enum.Enum", "enum.IntEnum", "enum.StrEnum"}
"""Their fields are read where a message arrives."""


def test_every_definition_is_used_by_more_than_tests():
    used = uses(python_files(*PRODUCT, "bench"))
    used.documented.update(documented_words())
    others = set(python_files("tests")) - {Path(__file__).resolve()}
    tests = set(re.findall(r"\w+", " ".join(path.read_text() for path in others)))
    dead = {
        f"{shown(path)}:{name}"
        for path in python_files(*PRODUCT)
        for name in unused(path, used)
        if path.parent.name != "testing" or name.rpartition(".")[2] not in tests
    }  # what users check a store with is there for tests

    refuse(sorted(dead - CALLED_BY_OTHERS.keys()), "only tests use these, or nobody: delete them")
    refuse(sorted(CALLED_BY_OTHERS.keys() - dead), "these are used, or gone: take them out")


@pytest.mark.parametrize(
    ("text", "dead"),
    [
        ("def f(): f()", ["f"]),
        ("def f(): 1\nf()", []),
        ("A = 1", ["A"]),
        ("_a: int = 1", ["_a"]),
        ("if 1:\n class A: 1", ["A"]),
        ("class A:\n def f(self): self.f()\nA", ["A.f"]),
        ("class A:\n def f(self): 1\nA().f()", []),
        ("class A:\n def f(self): self.b = 1\nA().f()", ["A.b"]),
        ("class A:\n def f(self): self.b = 1\nA().f().b", []),
        ("class A:\n b = 1\nA", ["A.b"]),
        ("class A:\n b = 1\ngetattr(A, 'b')", []),
        ("class A:\n b: int\nA", ["A.b"]),
        ("class A:\n b: int\nclass B:\n def b(self): 1\nA.b, B", ["B.b"]),
        ("class A:\n def b(self): 1\nmap(A.b, [])", []),
        ("class A:\n @property\n def b(self): 1\nA().b", []),
        ("class A:\n b: int\nmatch 1:\n case A(b=1): 1", []),
        ("class B: 1\nclass A(B):\n def f(self): 1\nA", ["A.f"]),
        ("import threading\nclass A(threading.Thread):\n def run(self): 1\nA", []),
        ("import b\nclass B(b.C): 1\nclass A(B):\n def run(self): 1\nA", []),
        ("from msgspec import Struct\nclass A(Struct):\n b: int\n def f(self): 1\nA", ["A.f"]),
    ],
)
def test_what_nobody_uses_is_found(tmp_path, text, dead):
    path = tmp_path / "made.py"
    path.write_text(text)

    assert sorted(unused(path, uses([path]))) == dead


class Uses(NamedTuple):
    """What some files refer to.

    Attributes:
        names: dotted names of what is in modules.
        reads: how often anything's attribute of that name is read, calls included.
        calls: how often it is called.
        data: names of attributes that are no methods.
        documented: names that users find in documents.
        ancestors: class → all that it is derived from, by dotted name where that is imported.
    """

    names: set[str]
    reads: Counter[str]
    calls: Counter[str]
    data: set[str]
    documented: set[str]
    ancestors: dict[str, set[str]]


def uses(paths: Sequence[Path]) -> Uses:
    project = PYPROJECT["project"]
    tables = [project["scripts"], *project["entry-points"].values()]
    names = {target.replace(":", ".") for table in tables for target in table.values()}
    names |= {f"kvstore.{name}" for name in importlib.import_module("kvstore").__all__}
    found = Uses(names, Counter(), Counter(), set(), set(), {})
    parents: dict[str, set[str]] = {}
    for path in paths:
        here = full_names(path)
        names |= set(here.values())
        whole = list(walk(tree_of(path)))
        found.reads.update(chain.from_iterable(map(reads, whole)))
        found.calls.update(chain.from_iterable(map(calls, whole)))
        for node in whole:
            if isinstance(node, ast.Attribute):
                names.add(resolved(node, here))
            elif isinstance(node, ast.ClassDef):
                bases = [one.value if isinstance(one, ast.Subscript) else one for one in node.bases]
                parents[node.name] = {resolved(base, here) for base in bases}
                found.data.update(name for name, one in members(node) if not is_method(one))
    found.ancestors.update({name: ancestors_of(name, parents) for name in parents})
    return found


def ancestors_of(name: str, parents: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    left = [name]
    while left:
        for one in parents.get(left.pop().rpartition(".")[2], ()):
            if one not in found:
                found.add(one)
                left.append(one)
    return found


def reads(node: ast.AST) -> list[str]:
    """Attributes that one node reads, also by a pattern, or by a name in a string."""
    match node:
        case ast.Attribute(attr=name, ctx=ast.Load()):
            return [name]
        case ast.MatchClass(kwd_attrs=names):
            return names
        case ast.Constant(value=str() as text) if text.isidentifier():
            return [text]
    return []


def reads_of_self(node: ast.AST) -> list[str]:
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Load()):
            return [name]
    return []


def calls(node: ast.AST) -> list[str]:
    match node:
        case ast.Call(func=ast.Attribute(attr=name)):
            return [name]
    return []


def documented_words() -> set[str]:
    """Words in what users' documents show as code: fields of JSON, names for their programs."""
    fenced = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for path in files():
        if path.suffix == ".md" and not OURS.search(shown(path)):
            for code in fenced.findall(path.read_text()):
                found |= set(re.findall(r"\w+", code))
    return found


def unused(path: Path, used: Uses) -> Iterator[str]:
    """What a file defines that nobody refers to."""
    module = module_of(path)
    loads = [
        (node.id, node.lineno)
        for node in walk(tree_of(path))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    ]
    for name, node in definitions(tree_of(path).body):
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        loaded = any(of == name and at not in lines for of, at in loads)
        if not loaded and f"{module}.{name}" not in used.names and not is_special(name):
            yield name
    for node in walk(tree_of(path)):
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{name}" for name in unused_members(node, used))


def unused_members(of: ast.ClassDef, used: Uses) -> Iterator[str]:
    ancestors = used.ancestors[of.name]
    if any(one.partition(".")[0] not in OWN_ROOTS for one in ancestors if "." in one):
        return
    of_self = counted(reads_of_self, of)
    for name, node in members(of):
        if is_special(name) or (ancestors & ENCODED and not isinstance(node, Function)):
            continue
        if is_method(node) and name in used.data:  # others read what is no method
            read = used.calls[name] - counted(calls, node)[name]
            read += of_self[name] - counted(reads_of_self, node)[name]
        else:
            read = used.reads[name] and used.reads[name] - counted(reads, node)[name]
        if not read and (is_method(node) or name not in used.documented):
            yield name


def counted(what: Callable[[ast.AST], list[str]], within: ast.AST) -> Counter[str]:
    return Counter(chain.from_iterable(map(what, walk(within))))


def members(of: ast.ClassDef) -> list[tuple[str, ast.AST]]:
    """What a class defines, and what its methods keep in ``self``."""
    stores = {
        node.attr: node
        for node in walk(of)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and dotted(node.value) == "self"
    }
    return [*definitions(of.body), *stores.items()]


def is_method(node: ast.AST) -> bool:
    """Whether it is one that is called; a property is read."""
    return isinstance(node, Function) and not any(
        dotted(one) in {"property", "cached_property"} for one in node.decorator_list
    )


def definitions(body: Sequence[ast.stmt]) -> list[tuple[str, ast.stmt]]:
    """Names that statements of a module or class give, those under conditions too."""
    found: list[tuple[str, ast.stmt]] = []
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.append((node.name, node))
            case ast.Assign(targets=targets):
                found += [(one.id, node) for one in targets if isinstance(one, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.append((name, node))
            case ast.If() | ast.Try():
                found += definitions([*node.body, *node.orelse])
    return found


def module_of(path: Path) -> str:
    inside = path.relative_to(ROOT) if ROOT in path.parents else Path(path.name)
    return ".".join(inside.with_suffix("").parts).removesuffix(".__init__")


def is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")
