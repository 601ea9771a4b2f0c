"""The endpoints that nodes and engines name to each other."""

import re
from typing import Final

_ENDPOINT: Final = re.compile(r"(?:[\w.-]+|\[[\da-fA-F:.]+\]):(\d{1,5})", re.ASCII)
_ENDPOINT_CHARS_MAX: Final = 200


def is_endpoint(text: str) -> bool:
    """Whether this is ``host:port``, so that Mooncake may get it: others end its process."""
    found = _ENDPOINT.fullmatch(text) if len(text) <= _ENDPOINT_CHARS_MAX else None
    return found is not None and 0 < int(found[1]) < 1 << 16
