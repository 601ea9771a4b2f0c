"""Resolves short names of a node: prefixes of keys and spaces, and model names."""

import re
from typing import Final

from kvstore.cli.remote import Remote
from kvstore.cli.show import cell, identity
from kvstore.protocol.errors import InvalidArgument, NotFound
from kvstore.server.answers import PageList, SpaceList, SpaceRow

PREFIX_MIN: Final = 6
"""Minimum length of a prefix of a key or space."""
SPACES_MAX: Final = 1 << 20
PAGES_MAX: Final = 100_000
"""Pages that are searched for a key; this takes seconds."""
_SHOWN_MAX: Final = 10
_FULL: Final = re.compile("[0-9a-f]{64}")
_PREFIX: Final = re.compile(rf"[0-9a-f]{{{PREFIX_MIN},63}}")


class Names:
    """The spaces and keys of one node, requested when a short name is used.

    Args:
        node: the node to ask.
    """

    def __init__(self, node: Remote) -> None:
        self._node = node
        self._spaces: list[SpaceRow] | None = None
        self._keys: dict[str, list[str]] = {}

    def space(self, name: str) -> str:
        """The label of a space, given its label, a prefix of it, or its model.

        Raises:
            NotFound: no space matches.
            InvalidArgument: several match; the message lists them.
        """
        if _FULL.fullmatch(name.lower()):
            return name.lower()
        every, digits = self._all_spaces(), name.lower()
        found = (
            [one for one in every if _PREFIX.fullmatch(digits) and one.space.startswith(digits)]
            or [one for one in every if one.model == name]
            or [one for one in every if one.model.rpartition("/")[2] == name]
        )
        if not found:
            raise NotFound("space", f"{name!r} is not open here; kvstore spaces lists the spaces")
        if len(found) > 1:
            listed = [f"{one.space[:12]}  {cell(identity(one))}" for one in found]
            raise InvalidArgument("space", _several(name, listed))
        return found[0].space

    def key(self, space: str | None, name: str) -> str:
        """A full key, given all its digits or a prefix.

        Args:
            space: label of the space of the key; None = any.
            name: the key, or a prefix of it.

        Raises:
            NotFound: no stored page has such a key.
            InvalidArgument: this is not a key, or several match; the message lists them.
        """
        name = name.lower()
        if _FULL.fullmatch(name):
            return name
        if not _PREFIX.fullmatch(name):
            message = f"{name!r} is not a key: 64 hex digits, or the first {PREFIX_MIN} or more"
            raise InvalidArgument("key", message)
        spaces = [one for one in self._all_spaces() if space in (None, one.space)]
        pages = sum(one.pages for one in spaces)
        if pages > PAGES_MAX:
            message = f"{pages:,} pages are too many to search: give all 64 digits"
            raise InvalidArgument("key", message)
        found = {
            key: None for one in spaces for key in self._keys_of(one.space) if key.startswith(name)
        }
        if not found:
            raise NotFound("key", f"no stored page has a key that begins with {name!r};"
                                  " for a page that was evicted, give all 64 digits")  # fmt: skip
        if len(found) > 1:
            raise InvalidArgument("key", _several(name, list(found)))
        return next(iter(found))

    def _all_spaces(self) -> list[SpaceRow]:
        if self._spaces is None:
            listed = self._node.listed("spaces", "/v1/spaces", SpaceList, {}, SPACES_MAX)
            self._spaces = listed.value.spaces
        return self._spaces

    def _keys_of(self, space: str) -> list[str]:
        if space not in self._keys:
            listed = self._node.listed("pages", "/v1/pages", PageList, {"space": space}, PAGES_MAX)
            self._keys[space] = [one.key for one in listed.value.pages]
        return self._keys[space]


def _several(name: str, listed: list[str]) -> str:
    more = len(listed) - _SHOWN_MAX
    lines = [f"{name!r} matches {len(listed)}: give more of it", *listed[:_SHOWN_MAX]]
    return "\n  ".join([*lines, f"and {more} more"] if more > 0 else lines)
