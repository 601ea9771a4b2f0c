"""Resolves names in requests of operators: labels of spaces, keys of pages."""

from collections.abc import Iterable

from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.page import KEY_BYTES, PrefixKey
from kvstore.server.refusal import Refusal
from kvstore.state.tree.prefix_tree import PrefixTree


def space_of(spaces: Iterable[PrefixTree], label: str, field: str = "space") -> PrefixTree:
    """The space with a label, or with a prefix of it (8 or more hex digits).

    Args:
        spaces: all spaces.
        label: label or prefix in the request.
        field: field of the request, for the message.

    Raises:
        Refusal: 404 if none matches, 400 if several match.
    """
    short = len(label) >= 8
    found = [one for one in spaces if one.label == label or (short and one.label.startswith(label))]
    if not found:
        raise Refusal(404, "not_found", f"{label[:80]!r} is not open here; see /v1/spaces", field)
    if len(found) > 1:
        raise Refusal(400, "invalid_argument", f"several spaces begin with {label!r}", field)
    return found[0]


def key_of(text: str, field: str = "key") -> PrefixKey:
    """Parse a key of 64 hex digits.

    Raises:
        InvalidArgument: it is not a key.
    """
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise InvalidArgument(field, f"{text[:80]!r} is not a key ({2 * KEY_BYTES} hex digits)")
    return PrefixKey(key)


def not_stored(key: str, field: str) -> Refusal:
    """The refusal for a page that is not stored."""
    message = f"{key[:80]} is not stored in this space; explain says why"
    return Refusal(404, "not_found", message, field)
