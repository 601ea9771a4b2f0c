"""Messages of which one field is wrong, made from the fields that their classes have now.

A message is given as an example that is right. For each of its fields there are values of another
type, which a decoder must refuse, and values at the edges of the type, which may make sense or not.
A new field, or a new message, needs no new line here: :func:`of_another_type` goes by the class.
"""

from collections.abc import Iterator
from random import Random
from types import NoneType
from typing import Any, Final, get_args

import msgspec

EDGES: Final = (0, 1, 2, 3, 15, 16, 17, 1 << 20, (1 << 20) + 1, (1 << 31) - 1, 1 << 31, 1 << 32,
                (1 << 62), (1 << 63) - 1)  # fmt: skip


def plain(message: msgspec.Struct) -> Any:
    """What is encoded: a list with the tag, or a dictionary."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message))


def kinds_of(union: Any) -> list[type[msgspec.Struct]]:
    """The classes of a union of messages."""
    return list(union.__args__)


def of_another_type(message: msgspec.Struct) -> Iterator[tuple[str, Any]]:
    """What each field, and each field of a field, is called; and all of it, with another type."""
    whole = plain(message)
    text = isinstance(whole, dict)  # of JSON, which has no bytes
    for path in sorted(_paths(whole), key=str):
        value = _at(whole, path)
        for wrong in (None, "x", -7, [], {}, [[]], 1.5, True, *([] if text else [b"x"])):
            optional = wrong is None and path in _optional(message)
            if _kind(wrong) != _kind(value) and not optional:
                yield f"{path} is {wrong!r}", _changed(whole, path, wrong)
    needed = sum(field.required for field in msgspec.structs.fields(message))
    shorter = whole[:needed] if isinstance(whole, list) else dict(list(whole.items())[1:])
    yield "the last field that must be there is missing", shorter
    yield "no message", 7
    yield "nothing", None


def at_an_edge(message: msgspec.Struct, chance: Random) -> Any:
    """All of it, with another value of its type in one field."""
    whole = plain(message)
    paths = [path for path in _paths(whole) if not isinstance(_at(whole, path), list | dict)]
    path = chance.choice(sorted(paths, key=str)) if paths else ()
    value = _at(whole, path)
    if isinstance(value, bool) or value is None:
        return whole
    if isinstance(value, int):
        value = chance.choice(EDGES) * chance.choice((1, 1, -1))
    elif isinstance(value, bytes):
        value = chance.choice((b"", value[:-1], value + b"x", value * 2, value[::-1],
                               bytes(len(value)), chance.randbytes(len(value)),
                               value[:4] * (len(value) // 4), value * 1_000))  # fmt: skip
    elif isinstance(value, str):
        value = chance.choice(("", "\0\n\x1b[31m", "x" * 201, "x" * 100_000, value[::-1]))
    elif isinstance(value, float):
        value = chance.choice((-1.0, 0.0, 1e308))
    return _changed(whole, path, value)


def _optional(message: msgspec.Struct) -> list[tuple[Any, ...]]:
    """The places of fields that may be None, where messages are lists that begin with a tag."""
    return [
        (at,)
        for at, field in enumerate(msgspec.structs.fields(message), 1)
        if NoneType in get_args(field.type)
    ]


def _kind(value: Any) -> type:
    """Numbers of a JSON or MessagePack document are of one kind when they are whole."""
    return int if isinstance(value, int) and not isinstance(value, bool) else type(value)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of a document; the first entry of a list may be the tag of a message."""
    entries: Any = ()
    if isinstance(value, list):
        entries = enumerate(value)
    elif isinstance(value, dict):
        entries = value.items()
    for key, part in entries:
        yield (*path, key)
        yield from _paths(part, (*path, key))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _changed(value: Any, path: tuple[Any, ...], wrong: Any) -> Any:
    if not path:
        return wrong
    made = list(value) if isinstance(value, list) else dict(value)
    made[path[0]] = _changed(value[path[0]], path[1:], wrong)
    return made
