"""The allowed values of a configuration field, in words for messages."""

import enum
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import msgspec

from kvstore.protocol.sizes import exact

_PLAIN: Final = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a text",
}  # fmt: skip


def allowed(kind: Any, *, size: bool = False) -> str:
    """The values that a type allows, such as ``one of lru, lfu``; empty if there is no description.

    Args:
        kind: the type of a field; the ``description`` of its ``Meta`` describes a pattern.
        size: numbers are sizes in bytes.
    """
    if get_origin(kind) is Annotated:
        base, *notes = get_args(kind)
        text = allowed(base, size=size)
        for note in notes:
            if isinstance(note, msgspec.Meta):
                text = note.description or text + _bounds(note, size=size)
        return text
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(filter(None, (allowed(one, size=size) for one in get_args(kind))))
    if get_origin(kind) is tuple:
        each = allowed(get_args(kind)[0], size=size)
        return f"a list, each {each}" if each else "a list"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return f"one of {', '.join(str(one.value) for one in kind)}"
    return "a size" if size and kind is int else _PLAIN.get(kind, "")


def _bounds(note: msgspec.Meta, *, size: bool) -> str:
    """The limits of a number or of a text's length."""
    words = [
        f"{word} {exact(int(limit)) if size else f'{limit:,.15g}'}"
        for word, limit in (
            ("at least", note.ge), ("more than", note.gt), ("at most", note.le),
            ("less than", note.lt), ("a multiple of", note.multiple_of),
        )
        if limit is not None
    ]  # fmt: skip
    if note.max_length is not None:
        words.append(f"at most {note.max_length} characters")
    return f", {', '.join(words)}" if words else ""
