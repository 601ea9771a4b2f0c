"""How much Python's cyclic collector has to look at."""

import gc
from types import FunctionType, ModuleType


def references(*kept: object) -> int:
    """The references that the collector follows from some objects on; not into code and classes."""
    seen: set[int] = set()
    found, ahead = 0, list(kept)
    while ahead:
        one = ahead.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType):
            continue
        seen.add(id(one))
        refers_to = gc.get_referents(one)
        found += len(refers_to)
        ahead += refers_to
    return found
