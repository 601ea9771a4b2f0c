"""Wraps the prose of pages: ``python -m tests.docs.wrap PAGE...``.

A paragraph or an item of a list is wrapped again if one of its lines is too long. Tables, headings
and code stay as they are.
"""

import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

WIDTH: Final = 100
_FENCE: Final = re.compile(r"\s*(```|~~~)")
_ITEM: Final = re.compile(r"(\s*(?:[-*+]|\d+[.)])\s+)(.*)")
_ALONE: Final = re.compile(r"\s*(?:\||#|>|<|\[[^\]]+\]:|$)")
_MARK: Final = re.compile(r"(?:[-*+#>]|\d+[.)])(?: |$)|\|")


def main(names: Sequence[str]) -> None:
    for name in names:
        page = Path(name)
        page.write_text(wrapped(page.read_text()))


def wrapped(text: str) -> str:
    """The text with lines of at most :data:`WIDTH`, where that is possible."""
    return "\n".join(line for block in _blocks(text.split("\n")) for line in block)


def _blocks(lines: list[str]) -> Iterator[list[str]]:
    """Paragraphs and items, wrapped, and the lines that stay as they are."""
    block: list[str] = []
    fence = ""
    for line in lines:
        found = _FENCE.match(line)
        if found and not fence:
            fence = found[1]
        elif fence:
            fence = "" if found and found[1] == fence else fence
        elif not _ALONE.match(line):
            if _ITEM.match(line) and block:
                yield _filled(block)
                block = []
            block.append(line)
            continue
        if block:
            yield _filled(block)
            block = []
        yield [line]
    if block:
        yield _filled(block)


def _filled(block: list[str]) -> list[str]:
    if all(len(line) <= WIDTH for line in block):
        return block
    item = _ITEM.match(block[0])
    first = item[1] if item else re.match(r"\s*", block[0])[0]
    words = " ".join(" ".join([block[0][len(first) :], *block[1:]]).split())
    found: list[str] = []
    for width in range(WIDTH, WIDTH - 20, -1):  # until no word at a line's start is a mark
        found = textwrap.wrap(
            words, width, initial_indent=first, subsequent_indent=" " * len(first),
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        if not any(_MARK.match(line.strip()) for line in found[1:]):
            return found
    return block


if __name__ == "__main__":
    main(sys.argv[1:])
