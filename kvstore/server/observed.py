"""What the admin API sees of a node: the daemon, as far as operators look at it and operate it."""

from collections.abc import Generator
from typing import Any, Protocol

from kvstore.config import Loaded, ServerConfig
from kvstore.errors import InvalidArgument
from kvstore.node.desk import Desk
from kvstore.node.node import Node
from kvstore.page import KEY_BYTES, PrefixKey
from kvstore.server.refusal import Refusal
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.tier.host import HostMemory


class Movement(Protocol):
    """Pages on their way between tiers; every call is made on the state's loop.

    Attributes:
        done: what is done, of ``total``.
    """

    done: int
    total: int

    def steps(self) -> Generator[float | None, None, None]:
        """Begin, and go on until nothing of it is under way any more."""

    def cancel(self) -> None:
        """Begin nothing more."""


class Movements(Protocol):
    """What moves pages between tiers; every call is made on the state's loop."""

    def prefetch(self, space: PrefixTree, keys: list[PrefixKey], deadline_ns: int) -> Movement:
        """Bring pages from the SSD into host memory, as far as that works by the deadline."""

    def demote(self, space: PrefixTree, keys: list[PrefixKey], deadline_ns: int) -> Movement:
        """Write pages of host memory to the SSD, then let go of their memory."""


class Observed(Protocol):
    """What the admin API shows and operates; all calls are made on the state's loop.

    Attributes:
        desk: where what is done to the state is carried out.
        node: decides.
        memory: the bytes of the host tier.
        loaded: the configuration and where its values came from.
        movements: moves pages between tiers; None on a node with one tier.
    """

    desk: Desk
    node: Node
    memory: HostMemory
    loaded: Loaded[ServerConfig]
    movements: Movements | None

    def unready(self) -> str:
        """Why no page can be stored; empty when they can."""

    def stats(self) -> dict[str, Any]:
        """One snapshot of everything that can be counted: a :class:`kvstore.server.counts.Stats`.

        Its values are plain, and it takes less than a turn however much there is.
        """

    def tiers(self) -> list[dict[str, Any]]:
        """Each tier's name, sizes and state: those of :class:`kvstore.server.counts.TierList`."""

    def policy(self) -> dict[str, Any]:
        """The policies at work: a :class:`kvstore.server.answers.Policy`."""

    def set_policy(self, name: str) -> None:
        """Change the eviction policy.

        Raises:
            InvalidArgument: there is none of that name; nothing has changed.
        """


def space_of(observed: Observed, label: str, field: str = "space") -> PrefixTree:
    """The space of a label, or of the beginning of one (8 or more hex digits).

    Raises:
        Refusal: 404 none, 400 more than one.
    """
    short = len(label) >= 8
    found = [
        one
        for one in observed.node.pages.spaces
        if one.label == label or (short and one.label.startswith(label))
    ]
    if not found:
        raise Refusal(404, "not_found", f"{label[:80]!r} is not open here; see /v1/spaces", field)
    if len(found) > 1:
        raise Refusal(400, "invalid_argument", f"{label!r} begins several spaces", field)
    return found[0]


def key_of(text: str, field: str = "key") -> PrefixKey:
    """A key from its 64 hex digits.

    Raises:
        InvalidArgument: it is none.
    """
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise InvalidArgument(field, f"{text[:80]!r} is not a key ({2 * KEY_BYTES} hex digits)")
    return PrefixKey(key)


def not_stored(key: str, field: str) -> Refusal:
    """What is asked of a page that a space does not have."""
    message = f"{key[:80]} is not stored in this space; explain says why"
    return Refusal(404, "not_found", message, field)
