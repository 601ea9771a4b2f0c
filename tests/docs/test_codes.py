"""Goal: an operator finds every error code and every verb of the command in the documentation."""

import re
from pathlib import Path

import pytest

from kvstore.cli.command import _parser
from kvstore.protocol import errors
from kvstore.server.refusal import STATUS
from tests.conftest import ROOT

ADMIN = (ROOT / "docs/operations/admin.md").read_text()
TROUBLESHOOTING = (ROOT / "docs/operations/troubleshooting.md").read_text()
_REFUSAL = re.compile(r'Refusal\(\s*(\d{3}),\s*"(\w+)"')


def refusals() -> set[tuple[int, str]]:
    """Status and code of what the admin API refuses by itself."""
    files: list[Path] = [*(ROOT / "kvstore").rglob("*.py")]
    found = {pair for path in files for pair in _REFUSAL.findall(path.read_text())}
    return {(int(status), code) for status, code in found}


def rows(page: str, title: str) -> list[str]:
    """The rows of the tables in one section."""
    section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| ")]


def test_every_code_of_an_error_is_in_the_table_of_codes():
    codes = {
        one.code
        for one in vars(errors).values()
        if isinstance(one, type) and issubclass(one, errors.KVStoreError)
    }
    named = {code for row in rows(TROUBLESHOOTING, "Error codes")
             for code in re.findall(r"`(\w+)`", row.split("|")[1])}  # fmt: skip

    assert codes <= named
    assert named - codes == {"not_clustered"}, "only over HTTP"


def test_every_status_and_code_of_the_admin_api_is_in_its_table():
    table = rows(ADMIN, "Errors and limits")
    pairs = refusals() | {(status, code) for code, status in STATUS.items()}
    assert len(refusals()) > 5, "they were not found"

    missing = [
        (status, code)
        for status, code in sorted(pairs)
        if not any(str(status) in row.split("|")[1] and f"`{code}`" in row for row in table)
    ]
    assert not missing


@pytest.mark.parametrize("verb", _parser().verbs)
def test_every_verb_is_in_the_table_of_routes_and_verbs(verb):
    commands = [row.split("|")[2] for row in rows(ADMIN, "Routes and verbs")]

    assert any(re.search(rf"`(kvstore )?{verb}\b", one) for one in commands)
