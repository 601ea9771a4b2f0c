"""Goal: what docs/security.md says rests on tests that there are."""

import ast
import re
from functools import cache

import pytest

from tests.conftest import ROOT

PAGE = ROOT / "docs" / "security.md"
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE.read_text())))
SECTIONS_WITHOUT = {"Who is trusted", "What is not defended"}
"""They say what nothing is done about."""


@cache
def named_in(path: str) -> frozenset[str]:
    """The tests of a file."""
    tree = ast.parse((ROOT / path).read_text())
    functions = [
        one for one in tree.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return frozenset(one.name for one in functions if one.name.startswith("test_"))


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_test_that_the_page_names_exists(path, name):
    assert (ROOT / path).is_file()
    if name:
        assert name in named_in(path)


def test_every_section_of_claims_names_tests():
    for section in PAGE.read_text().split("\n## ")[1:]:
        title = section.partition("\n")[0]
        assert ("::test_" in section) is (title not in SECTIONS_WITHOUT), title


def test_nothing_is_named_in_a_form_that_would_not_be_looked_for():
    """A name that is broken over two lines, or has a typing error before its ``::``."""
    text = PAGE.read_text()

    assert text.count("::test_") == len(re.findall(r"`tests/[\w/]+\.py::test_\w+`", text))
