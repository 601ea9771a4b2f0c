"""Goal: whoever configures the Conductor finds every key, its default and its meaning."""

import msgspec
import pytest

from conductor.config import ConductorConfig
from tests.docs import conductor_page


def test_the_page_of_the_conductors_settings_is_that_of_the_sources():
    made = conductor_page.page()

    assert conductor_page.PAGE.read_text() == made, "run python -m tests.docs.conductor_page"


def test_every_setting_of_a_section_has_a_row():
    sections = msgspec.to_builtins(ConductorConfig())
    printed = {f"{name}.{key}" for name, section in sections.items() for key in dict(section)}

    lists = {name for name, section in sections.items() if not section}
    named = {key for key in conductor_page.settings() if key.partition(".")[0] not in lists}
    assert lists == {"classes", "models", "engines", "nodes"}
    assert named == printed


@pytest.mark.parametrize(
    "row", ["| `port` | 7700 |", "| `waiting_max` | 1,024 |", "| `tokenizer` | required |"]
)
def test_defaults_are_shown(row):
    assert row in conductor_page.page()
