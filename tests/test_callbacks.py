"""Goal: in the pure state nobody is handed a method to call its caller back, but values.

A part that calls another one back does so in the middle of a change: see
``docs/decisions/0037-effects-of-the-disk-side.md``.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_tidy import Function, dotted, python_files, refuse, shown, tree_of, walk

PURE = "kvstore/state/"
MUTATORS = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popleft",
    "remove", "setdefault", "update",
}  # fmt: skip
"""Methods of collections: whoever gets one changes what belongs to somebody else."""
CHECKS = {
    "self._has_grace": "kvstore/state/choice/eviction.py: an order of leaves, and changes nothing",
    "self._rates.of": "kvstore/state/remote/pages.py: an order of peers, and changes nothing",
}
"""What is handed over nevertheless: where, and why."""


def pure_files() -> list[Path]:
    return [path for path in python_files("kvstore") if shown(path).startswith(PURE)]


def methods_and_data(trees: list[ast.Module]) -> tuple[set[str], set[str]]:
    """Names of methods that are called, and names of what else objects have."""
    methods, data = set[str](), set[str]()
    for one in trees:
        for node in walk(one):
            match node:
                case ast.ClassDef():
                    for of in node.body:
                        if isinstance(of, Function) and not of.decorator_list:
                            methods.add(of.name)
                        elif isinstance(of, Function):
                            data.add(of.name)
                        elif isinstance(of, ast.AnnAssign) and isinstance(of.target, ast.Name):
                            data.add(of.target.id)
                case ast.Assign():
                    data |= {at.attr for of in node.targets for at in walk(of) if is_self(at)}
                case ast.AnnAssign(target=ast.Attribute(attr=name)):
                    data.add(name)
    return methods, data


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and dotted(node) == f"self.{node.attr}"


def calls(top: ast.AST) -> list[ast.Call]:
    return [one for one in walk(top) if isinstance(one, ast.Call)]


def handed_over(top: ast.AST, names: set[str]) -> Iterator[tuple[int, str]]:
    """Methods that are arguments of a call, or are called by a lambda that is one."""
    for call in calls(top):
        for given in [*call.args, *(of.value for of in call.keywords)]:
            if isinstance(given, ast.Attribute) and given.attr in names:
                yield given.lineno, ast.unparse(given)
            for one in calls(given) if isinstance(given, ast.Lambda) else ():
                if is_self(one.func):
                    yield given.lineno, ast.unparse(one.func)


def test_no_method_is_handed_over_to_be_called_back():
    paths = pure_files()
    methods, data = methods_and_data([tree_of(path) for path in paths])
    names = (methods | MUTATORS) - data
    found = [(path, *of) for path in paths for of in handed_over(tree_of(path), names)]

    faults = [f"{shown(path)}:{line} {what}" for path, line, what in found if what not in CHECKS]
    refuse(faults, "return a value, or a list of what is to be done, to the caller")
    assert {what for _, _, what in found} == CHECKS.keys(), "an exception that is none"


@pytest.mark.parametrize(
    "line",
    [
        "NodeHeap(self.stays)",
        "Spreads(submit=self.jobs.append)",
        "pop(lambda one: self.stays(one))",
    ],
)
def test_a_method_that_is_handed_over_is_found(line):
    known = ast.parse("class Leaves:\n    def stays(self): pass")
    methods, data = methods_and_data([known])

    assert list(handed_over(ast.parse(line), (methods | MUTATORS) - data))
    assert not list(handed_over(ast.parse("sorted(self.jobs, key=len)"), methods | MUTATORS))
