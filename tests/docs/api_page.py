"""The page of the public Python API, made from the sources: ``python -m tests.docs.api_page``.

Classes, methods and functions stand there with the signatures and docstrings that they have in the
code. Names are those of ``kvstore.__all__``.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any, Final

import kvstore
from tests.conftest import ROOT

PAGE: Final = ROOT / "docs" / "python-api.md"
INTRODUCTION: Final = """\
# Python API

This page is generated from the docstrings by `python -m tests.docs.api_page`; do not edit it.
Import the names from `kvstore` (`from kvstore import KVStore`). Other names, and methods that are
not listed here, may change between versions.

- Sizes are in bytes and times in seconds, unless a name says otherwise.
- A **buffer** (`Buffer`) is `bytes`, a `bytearray`, a `memoryview` or a NumPy array of any dtype.
  It must be C-contiguous. The caller owns it: the store keeps no reference after the call.
- **Tokens** (`Tokens`) are a sequence of `int`, or a one-dimensional NumPy array of an integer
  dtype. Each must be in 0..2**32-1.
- In `lookup`, `get` and `restore_to_kvpool` a failure of the store is a miss. They raise an error
  only for a wrong argument.

[examples/embedded.py](../examples/embedded.py) is a complete program.
[engines/reference.md](engines/reference.md) describes step by step how an engine uses the store.
"""
SECTIONS: Final = {
    "Store": ["KVStore", "Space"],
    "Names and layouts of pages": [
        "SpaceIdentity", "ShardSpec", "CanonicalLayout", "OpaqueLayout", "PrefixKeys", "page_keys",
    ],
    "An engine's KV pool": ["KVPool"],
    "An engine's name": ["EngineLabel"],
    "Jobs": ["StoreJob", "RestoreJob"],
    "Configuration": ["DeviceSlabConfig"],
    "Results": ["Hit", "PutResult", "PageViews", "RestoreResult"],
    "Errors": [
        "KVStoreError", "ConfigError", "EngineNameTaken", "CapacityError", "TooFewCopies",
        "InvalidArgument",
        "LayoutMismatch", "NotFound", "TransferError", "TransferTimeout", "PeerUnreachable",
        "TierUnavailable", "DeviceUnavailable", "DurabilityUnavailable", "PageCorrupt",
        "ProtocolError",
    ],
}  # fmt: skip
"""All of ``kvstore.__all__`` but ``__version__``."""
INSIDE: Final = {
    "KVPool": {"pieces"},
    "KVStore": {"forked"},
    "PageViews": {"forked"},
    "RestoreJob": {"forked", "run"},
    "Space": {"batch_pages", "load_pieces", "numbers", "put_pieces"},
    "StoreJob": {"forked", "run"},
}
"""Methods for our own use."""
MADE_BY_METHODS: Final = {"KVStore", "PageViews", "RestoreJob", "Space", "StoreJob"}
"""Classes whose constructors are for our own use."""
OPERATORS: Final = {
    "__len__": "`len(…)`", "__getitem__": "indexes and slices", "__enter__": "`with`",
    "__eq__": "`==`", "__hash__": "`hash(…)`",
}  # fmt: skip
_WIDTH: Final = 100
_PROSE_WIDTH: Final = 100
_SECTION: Final = re.compile(r"^(Args|Attributes|Returns|Raises):\n", re.MULTILINE)
_ROLE: Final = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([^`]+)`")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def main() -> None:
    PAGE.write_text(page())


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n")
        for name in names:
            parts += _described(getattr(kvstore, name), name)
    return "\n".join(parts)


def _described(what: Any, name: str) -> Iterator[str]:
    """A heading, a signature and a docstring; of a class its methods too."""
    node = _tree(what)
    yield f"### {name}\n"
    if isinstance(node, Function):
        yield _code([_signature(node, method=False)])
        yield _text(ast.get_docstring(node) or "")
        return
    made = _functions(what).get("__init__", [None])[-1]
    by = (made and ast.get_docstring(made)) or ""
    yield _code([_class(what, node, made, hidden=name in MADE_BY_METHODS)])
    yield _text(ast.get_docstring(node) or "")
    if "Raises:" in by:
        yield _text(f"Raises:\n{by.partition('Raises:')[2].lstrip(chr(10))}")
    if issubclass(what, kvstore.KVStoreError):
        yield f"`code` is `{what.code}`; {'' if what.retryable else 'not '}retryable.\n"
    yield from _methods(what, name)


def _methods(what: type, name: str) -> Iterator[str]:
    functions = _functions(what)
    inside = INSIDE.get(name, set())
    assert inside <= functions.keys(), f"{name} has no {inside - functions.keys()} any more"
    for called, forms in functions.items():
        if called.startswith("_") or called in inside:
            continue
        yield f"#### {name}.{called}\n"
        shown = [one for one in forms if "overload" in _decorators(one)] or forms
        yield _code([_signature(one, method=True) for one in shown])
        yield _text(ast.get_docstring(forms[-1]) or "")
    if operators := [OPERATORS[one] for one in OPERATORS if one in functions]:
        yield f"It also takes {', '.join(operators)}.\n"


def _functions(what: type) -> dict[str, list[Function]]:
    """Name → the forms of a function, overloads first; of our own base classes too."""
    found: dict[str, list[Function]] = {}
    for kind in reversed(what.__mro__):
        if not kind.__module__.startswith("kvstore") or issubclass(kind, BaseException):
            continue
        own: dict[str, list[Function]] = {}
        for node in _tree(kind).body:
            if isinstance(node, Function):
                own.setdefault(node.name, []).append(node)
        found |= own
    return found


def _tree(what: Any) -> Any:
    return ast.parse(textwrap.dedent(inspect.getsource(what))).body[0]


def _decorators(node: Function) -> list[str]:
    return [ast.unparse(one) for one in node.decorator_list]


def _signature(node: Function, *, method: bool) -> str:
    returns = f" -> {ast.unparse(node.returns)}".replace("'", "") if node.returns else ""
    decorators = _decorators(node)
    if "property" in decorators:
        return f"{node.name}{returns.replace(' ->', ':')}  # property"
    arguments = _arguments(node)[method:]
    before = "@classmethod\n" if "classmethod" in decorators else ""
    return f"{before}def {_wrapped(node.name, arguments, returns)}"


def _class(what: type, node: ast.ClassDef, made: Function | None, *, hidden: bool) -> str:
    bases = [one.__name__ for one in what.__bases__ if one.__module__.startswith("kvstore")]
    if issubclass(what, BaseException):
        return f"class {node.name}({', '.join(bases) or 'Exception'})"
    if hidden:
        return f"class {node.name}"
    if made is not None:
        return f"class {_wrapped(node.name, _arguments(made)[1:], '')}"
    only = any(one.arg == "kw_only" and ast.unparse(one.value) == "True" for one in node.keywords)
    fields = [
        ast.unparse(one).replace("'", '"').replace(": str=", ": str = ")
        for one in node.body
        if isinstance(one, ast.AnnAssign) and not ast.unparse(one.annotation).startswith("Class")
    ]
    return f"class {_wrapped(node.name, [*(['*'] if only else []), *fields], '')}"


def _arguments(node: Function) -> list[str]:
    """Each argument with type and default, and the stars between them."""
    given, found = node.args, []
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    pairs = list(zip(plain, defaults, strict=True))
    starred = list(zip(given.kwonlyargs, given.kw_defaults, strict=True))
    for one, default in [*pairs, *([("*", None)] if starred else []), *starred]:
        if isinstance(one, str):
            found.append(one)
            continue
        text = one.arg + (f": {ast.unparse(one.annotation)}" if one.annotation else "")
        found.append(text + (f" = {ast.unparse(default)}" if default is not None else ""))
    return [one.replace("'", '"') for one in found]


def _wrapped(name: str, arguments: list[str], after: str) -> str:
    line = f"{name}({', '.join(arguments)}){after}"
    if len(line) <= _WIDTH - len("class "):
        return line
    return "\n".join([f"{name}(", *(f"    {one}," for one in arguments), f"){after}"])


def _code(lines: list[str]) -> str:
    return "```text\n" + "\n".join(lines) + "\n```\n"


def _text(docstring: str) -> str:
    """A docstring as Markdown: literal blocks as fences, sections as lists."""
    text = _ROLE.sub(r"`\1`", docstring).replace("``", "`")
    head, *rest = _SECTION.split(text)
    parts = [_prose(head)]
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        parts.append(f"**{title}**\n\n{_items(textwrap.dedent(body), title)}")
    return "\n".join(part for part in parts if part.strip())


def _prose(text: str) -> str:
    """Paragraphs; one that ends with two colons is followed by code."""
    found, code = [], False
    for paragraph in text.strip("\n").split("\n\n"):
        if code and paragraph.startswith(" "):
            found.append(_code([textwrap.dedent(paragraph)]).rstrip("\n"))
            continue
        code = paragraph.endswith("::")
        text = paragraph.removesuffix(":") if code else paragraph
        found.append(textwrap.fill(text, _PROSE_WIDTH, break_on_hyphens=False))
    return "\n\n".join(found) + "\n"


def _items(body: str, title: str) -> str:
    """``name: text`` lines as a list; what is returned has no name."""
    if title == "Returns":
        return f"{textwrap.fill(' '.join(body.split()), _PROSE_WIDTH, break_on_hyphens=False)}\n"
    found = []
    for item in re.split(r"\n(?=\S)", body.strip("\n")):
        name, _, text = " ".join(item.split()).partition(": ")
        names = ", ".join(f"`{one}`" for one in name.split(", "))
        line = f"- {names}: {text}"
        found.append(
            textwrap.fill(line, _PROSE_WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        )
    return "\n".join(found) + "\n"


if __name__ == "__main__":
    main()
