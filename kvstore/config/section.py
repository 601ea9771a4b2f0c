"""The base of all sections of a configuration."""

from typing import Annotated, Final

import msgspec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section: frozen, keyword-only, without unknown keys."""


NAME_WORDS: Final = "1 to 64 of A-Z a-z 0-9 . _ -"
NodeName = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$(?!\n)", description=NAME_WORDS)
]
