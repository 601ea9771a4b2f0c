"""Goal: whoever follows a link finds the section, and pages can be read side by side with code."""

import re
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.docs import wrap

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
WIDTH = 100
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s#:]*)#([^)\s]+)\)")


@cache
def anchors(page: Path) -> set[str]:
    """What GitHub calls the sections of a page."""
    prose = _FENCE.sub("", page.read_text())
    titles = re.findall(r"^#+ +(.+?) *$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_section_of_ours_leads_to_one(page):
    lost = [
        f"{path}#{anchor}"
        for path, anchor in _LINK.findall(_FENCE.sub("", page.read_text()))
        if anchor not in anchors((page.parent / path).resolve() if path else page)
    ]
    assert not lost


def test_links_to_sections_are_found():
    assert sum(len(_LINK.findall(page.read_text())) for page in PAGES) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_of_a_page_is_wrapped(page):
    lines = _FENCE.sub("", page.read_text()).splitlines()
    long = [line for line in lines if len(line) > WIDTH and not line.startswith("|")]
    faults = [line for line in long if len(line.split()) > 1]  # one word cannot be wrapped
    assert not faults, f"run python -m tests.docs.wrap {page.relative_to(ROOT)}"


def test_wrapping_makes_no_item_of_a_dash():
    page = f"{'x' * 49} {'y' * 49} - z"

    assert wrap.wrapped(page).split("\n") == ["x" * 49, f"{'y' * 49} - z"]


def test_wrapping_changes_prose_only():
    long = ["word"] * 40
    kept = [
        "# Title",
        "",
        f"| {' '.join(long)} |",
        "",
        "```sh",
        " ".join(long),
        "```",
        "",
        "short",
        "",
    ]
    page = "\n".join(
        [*kept, f"- {' '.join(long)}", "- item", "", f"  {' '.join(long)} - {' '.join(long)}"]
    )

    lines = wrap.wrapped(page).split("\n")

    assert lines[: len(kept)] == kept
    prose = lines[len(kept) :]
    assert max(map(len, prose)) <= WIDTH
    assert (prose[0][:6], prose[1][:6], prose[3:5]) == ("- word", "  word", ["- item", ""])
    assert " ".join(wrap.wrapped(page).split()) == " ".join(page.split())
