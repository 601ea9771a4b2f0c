"""The list of all modules, made from their docstrings: ``python -m tests.docs.module_page``."""

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.conftest import ROOT

PAGE: Final = ROOT / "docs" / "internals" / "modules.md"
TOPS: Final = ("kvstore", "conductor", "engine_adapters")
INTRODUCTION: Final = """\
# Modules

This page is generated from the first lines of docstrings by `python -m tests.docs.module_page`; do
not edit it. [architecture.md](../architecture.md#packages) shows how the packages depend on each
other, and in which order to read them. A **pure** module does no I/O and reads no clock. Modules in
bold may be imported by other packages; the others belong to their package.
"""
_WIDTH: Final = 100
_ROLE: Final = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([^`]+)`")


def main() -> None:
    PAGE.write_text(page())


def page() -> str:
    """The whole page."""
    starts = sorted(path for top in TOPS for path in (ROOT / top).rglob("__init__.py"))
    return "\n".join([INTRODUCTION, *(_package(start) for start in starts)])


def _package(start: Path) -> str:
    lines = [f"## {start.parent.relative_to(ROOT).as_posix()}", "", _wrapped(_head(start)), ""]
    return "\n".join(lines + [line for line in _modules(start) if line] + [""]).rstrip() + "\n"


def _modules(start: Path) -> Iterator[str]:
    shown = _shown(start)
    for path in sorted(start.parent.glob("*.py")):
        if path != start:
            name = f"**`{path.name}`**" if path.stem in shown else f"`{path.name}`"
            yield _wrapped(f"- {name}: {_head(path)}")


def _shown(start: Path) -> set[str]:
    """The strings in the ``__all__`` of a package."""
    for node in ast.parse(start.read_text()).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if ast.unparse(target) == "__all__":
                found = ast.walk(node.value)
                return {one.value for one in found if isinstance(one, ast.Constant)}
    return set()


def _head(path: Path) -> str:
    """The first paragraph of the docstring of a file."""
    head = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
    return _ROLE.sub(r"`\1`", " ".join(head.split())).replace("``", "`")


def _wrapped(text: str) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        subsequent_indent="  " * text.startswith("- "),
        break_on_hyphens=False,
        break_long_words=False,
    )


if __name__ == "__main__":
    main()
