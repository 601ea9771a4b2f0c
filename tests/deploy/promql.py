"""PromQL, as far as the dashboard and the alerts use it: series, labels, what is done to them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_GROUPING = re.compile(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR = re.compile(
    r"(?<![\w$\"])(?P<name>[a-zA-Z_:][\w:]*)\s*"
    r"(?P<after>\(|\{(?P<matchers>[^}]*)\})?\s*(?P<range>\[[^\]]+\])?"
)
_MATCHER = re.compile(r'\s*(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"\s*,?')
_WORDS = {"and", "or", "unless", "offset", "bool", "sum", "h", "d", "m"}


@dataclass(frozen=True)
class Selector:
    """Series that an expression takes.

    Attributes:
        matchers: (label, operator, value) of each.
        ranged: it has a range, ``[5m]``.
        function: what is called with it; empty when nothing is.
        quantile: it is an argument of histogram_quantile.
    """

    name: str
    matchers: tuple[tuple[str, str, str], ...]
    ranged: bool
    function: str
    quantile: bool


def grouping(expression: str) -> set[str]:
    """Every label by which something is grouped or matched."""
    clauses = _GROUPING.findall(expression)
    return {label for clause in clauses for label in re.findall(r"\w+", clause)}


def selectors(expression: str) -> Iterator[Selector]:
    """Every selector of an expression."""
    text = _GROUPING.sub(lambda found: " " * len(found[0]), expression)
    for found in _SELECTOR.finditer(text):
        if found["after"] == "(" or (found["name"] in _WORDS and not found["matchers"]):
            continue
        matchers = tuple(_MATCHER.findall(found["matchers"] or ""))
        assert _MATCHER.sub("", found["matchers"] or "").strip() == "", found["matchers"]
        around = list(_calls(text[: found.start()]))
        yield Selector(
            found["name"], matchers, found["range"] is not None,
            around[-1] if around else "", "histogram_quantile" in around,
        )  # fmt: skip


def _calls(before: str) -> Iterator[str]:
    """The functions whose parentheses are open at the end of a text, outermost first."""
    opened: list[str] = []
    for found in re.finditer(r"(\w*)\s*\(|\)", re.sub(r'"[^"]*"', '""', before)):
        if found[0] == ")":
            opened.pop()
        else:
            opened.append(found[1])
    yield from opened
