"""Goal: docs/python-api.md says of every public name what the code says."""

import kvstore
from tests.docs import api_page


def test_the_page_of_the_python_api_is_what_the_docstrings_make():
    assert api_page.PAGE.read_text() == api_page.page(), "run python -m tests.docs.api_page"


def test_the_page_has_every_public_name_once():
    named = [name for names in api_page.SECTIONS.values() for name in names]
    assert sorted(named) == sorted(set(kvstore.__all__) - {"__version__"})


def test_everything_on_the_page_has_a_docstring():
    parts = api_page.page().split("\n###")[1:]
    bare = [part.splitlines()[0] for part in parts if not part.rpartition("```")[2].strip()]

    assert len(parts) > 50
    assert not bare
