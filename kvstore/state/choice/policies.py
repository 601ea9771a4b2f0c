"""The eviction policies by name."""

from collections.abc import Callable
from typing import Final

from kvstore.protocol.errors import InvalidArgument
from kvstore.state.choice.highest_reuse import HighestReuse
from kvstore.state.choice.policy import (
    EvictionPolicy,
    FrequencySketch,
    LeastFrequent,
    LeastRecent,
    Looks,
    SmallAndMain,
)

POLICIES: Final[dict[str, Callable[[int, Looks], EvictionPolicy]]] = {
    "lru": LeastRecent,
    "lfu": LeastFrequent,
    "tinylfu": FrequencySketch,
    "s3-fifo": SmallAndMain,
    "kvstore": HighestReuse,
}


def new_policy(name: str, slot_bytes: int, looks: Looks | None = None) -> EvictionPolicy:
    """A policy for one class of slots.

    Args:
        name: one of :data:`POLICIES`.
        slot_bytes: the class.
        looks: what all policies of a node may pass over in a tick, together; None = its own.

    Raises:
        InvalidArgument: no policy has that name.
    """
    made = POLICIES.get(name)
    if made is None:
        raise InvalidArgument("policy", f"{name!r} is not one of {', '.join(POLICIES)}")
    return made(slot_bytes, looks or Looks())
