"""Queues that are replaced: of a former policy, or of tenants that are gone. Pure."""

from typing import Final, TypeVar

from kvstore.state.choice.policy import EvictionPolicy

T = TypeVar("T")

FORGOTTEN_MAX: Final = 512
"""Maximum things that a replaced queue holds that are freed at a time: 0.1 ms."""
FORGOTTEN_QUEUES: Final = 4
"""Maximum replaced queues that are freed at a time."""


def take_over(before: EvictionPolicy, queue: EvictionPolicy, tick: int, most: int) -> bool:
    """Move up to ``most`` leaves to the queue of the current policy; False if none was left."""
    for _ in range(most):
        node = before.pop(tick)
        if node is None:
            if not before.behind:
                return False
            before.sweep(most)
            return True
        queue.add_candidate(node, tick)
    return True


def take_gone(table: dict[tuple[str, int], T], tenants: set[str]) -> list[T]:
    """Take what is there for queues of other tenants than these, but for spaces with limits."""
    names = [name for name in table if name[0] not in tenants and not name[0].startswith("\0")]
    return [table.pop(name) for name in names]


def forget_some(replaced: list[EvictionPolicy]) -> bool:
    """Free some of what these queues hold, the last one first; whether all is free."""
    for _ in range(FORGOTTEN_QUEUES):
        if not replaced:
            break
        if not replaced[-1].forget(FORGOTTEN_MAX):
            return False
        replaced.pop()
    return not replaced
