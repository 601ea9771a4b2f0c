"""Goal: a docstring says what a reader does not know, in the words of the field.

CONTRIBUTING.md gives the rules; tests/test_tidy.py has those that are not about words.
"""

import ast
import re

import pytest

from tests.test_tidy import PRODUCT, large_trees, nodes, python_files, refuse, shown

__all__ = ["large_trees"]  # what pytest finds here
pytestmark = pytest.mark.usefixtures("large_trees")

INIT_WORDS_MIN = 8
"""An ``__init__`` that has less to say than this, and no argument or error, needs no docstring."""


def test_the_docstring_of_an_init_says_more_than_that_it_starts():
    faults = []
    for path in python_files(*PRODUCT, "bench"):
        for node, name in nodes(path):
            if not isinstance(node, ast.FunctionDef) or node.name != "__init__":
                continue
            said = ast.get_docstring(node)
            if said is None or re.search("^(Args|Raises):", said, re.MULTILINE):
                continue
            if len(said.split()) <= INIT_WORDS_MIN:
                faults.append(f"{shown(path)}:{node.lineno} {name}: {said}")

    refuse(faults, "take it out, or put what it says of the object into the class's docstring")
