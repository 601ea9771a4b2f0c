"""The page of the Conductor's settings, from its code: ``python -m tests.docs.conductor_page``."""

import inspect
import re
from collections.abc import Iterator
from typing import Final, get_args

from msgspec import NODEFAULT, Struct
from msgspec.structs import fields

from conductor.config import ConductorConfig
from conductor.costs.hardware import ACCELERATORS
from conductor.costs.shapes import SHAPES
from conductor.protocols import own_protocols
from conductor.routing.policy import POLICIES
from kvstore.protocol.sizes import exact
from tests.conftest import ROOT

PAGE: Final = ROOT / "docs" / "operations" / "conductor-configuration.md"
INTRODUCTION: Final = """\
# Settings of the Conductor

This page is generated from `conductor/config.py` by `python -m tests.docs.conductor_page`; do not
edit it. [conductor.md](../conductor.md#configuration) says where values come from. A setting is
written `key = value` in its section of the TOML file, `--set section.key=value`, or
`KVSTORE_CONDUCTOR__SECTION__KEY=value`. Lists are written as `[[engines]]` in the file.
"""
_ATTRIBUTE: Final = re.compile(r"^(\w+): ")
_LISTS: Final = {
    "conductor.routing.policy.POLICIES": POLICIES,
    "conductor.protocols.own_protocols()": own_protocols(),
    "conductor.costs.shapes.SHAPES": SHAPES,
    "conductor.costs.hardware.ACCELERATORS": ACCELERATORS,
}
"""What docstrings refer to, and the page lists."""
_ROLE: Final = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([^`]+)`")


def main() -> None:
    PAGE.write_text(page())


def page() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *_sections()])


def settings() -> list[str]:
    """Every setting, as ``section.key``."""
    return [f"{name}.{field.name}" for name, of in _parts() for field in fields(of)]


def _parts() -> Iterator[tuple[str, type[Struct]]]:
    """Each section and each list, with the type of its keys."""
    for field in fields(ConductorConfig):
        if isinstance(field.default, tuple):
            yield field.name, get_args(field.type)[0]
        else:
            yield field.name, type(field.default)


def _sections() -> Iterator[str]:
    for name, of in _parts():
        is_list = isinstance(getattr(ConductorConfig(), name), tuple)
        said = _described(of)
        lines = [
            f"## {name}", "", f"`[[{name}]]`" if is_list else f"`[{name}]`", "",
            "| key | default | meaning |", "|---|---|---|",
        ]  # fmt: skip
        for field in fields(of):
            default = (
                "required" if field.default is NODEFAULT else _shown(field.name, field.default)
            )
            lines.append(
                f"| `{field.name}` | {default} | {said[field.name]} |".replace("|  |", "| |")
            )
        yield "\n".join([*lines, ""])


def _described(of: type[Struct]) -> dict[str, str]:
    """Key → what the docstring says of it."""
    text = inspect.cleandoc(of.__doc__ or "").partition("Attributes:\n")[2]
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in map(str.strip, text.splitlines()):
        begins = _ATTRIBUTE.match(line)
        if begins is not None and begins[1] in of.__struct_fields__:
            lines = found[begins[1]] = [line[begins.end() :]]
        else:
            lines.append(line)
    plain = {name: " ".join(said).strip().rstrip(".") for name, said in found.items()}
    for where, names in _LISTS.items():
        listed = ", ".join(f"``{one}``" for one in names)
        plain = {name: said.replace(f"``{where}``", listed) for name, said in plain.items()}
    return {
        name: _ROLE.sub(r"`\1`", said).replace("``", "`").replace("|", "\\|")
        for name, said in plain.items()
    }


def _shown(name: str, value: object) -> str:
    """A default as the configuration has it."""
    if value is None or value in ("", ()):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int):
        if name == "port":
            return str(value)
        return exact(value) if name.endswith("bytes_max") else f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    return f"`{value}`"


if __name__ == "__main__":
    main()
