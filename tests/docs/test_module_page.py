"""Goal: the list of modules says what their docstrings say."""

from tests.docs import module_page


def test_the_list_of_modules_is_that_of_the_sources():
    made = module_page.page()

    assert made.count("\n- ") > 400, "it has not found the modules"
    assert module_page.PAGE.read_text() == made, "run python -m tests.docs.module_page"
