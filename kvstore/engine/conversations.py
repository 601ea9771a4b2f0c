"""Keeps the pages of conversations at the node after each of their requests."""

import hashlib
from collections.abc import Callable, Iterable
from typing import Final

from kvstore.client.space import Space
from kvstore.engine.options import Retain
from kvstore.protocol.page import PrefixKeys

NAME_CHARS_MAX: Final = 256
"""Longer names are hashed: a node refuses them."""
WAITING_MAX: Final = 1024
"""Maximum ended requests with unfinished stores; further ones are reported to the node at once."""


class RetainedConversations:
    """The conversations of an engine whose pages the node should keep.

    The node is asked once the stores of a request have ended.

    Args:
        space: the space, None while the node is away.
        retain: how long and how much to keep.
    """

    def __init__(self, space: Callable[[], Space | None], retain: Retain) -> None:
        self._space = space
        self._retain = retain
        self._waiting: dict[str, tuple[str, PrefixKeys]] = {}

    def finished(self, request_id: str, request: object, stored: Callable[[], PrefixKeys]) -> None:
        """A request has ended.

        Args:
            request_id: id of the request, for :meth:`advance`.
            request: its ``session_id``, if it has such an attribute and a value, names the
                conversation; otherwise nothing is kept.
            stored: returns its pages that are stored, or are being stored; called only if they are
                kept, because it may hash tokens.
        """
        name: str | None = getattr(request, "session_id", None)
        if not (self._retain.seconds and name):
            return
        keys = stored()
        if not len(keys):
            return
        raw = name.encode(errors="surrogatepass")
        if len(name) > NAME_CHARS_MAX or raw != name.encode(errors="replace"):
            name = hashlib.sha256(raw).hexdigest()
        if len(self._waiting) < WAITING_MAX:
            self._waiting[request_id] = name, keys
        else:
            self._keep(name, keys)

    def advance(self, jobs: Iterable[str]) -> None:
        """Keep the pages of ended requests, except those whose jobs, in ``jobs``, are running."""
        storing = set(jobs) if self._waiting else set()
        for request_id in [one for one in self._waiting if one not in storing]:
            self._keep(*self._waiting.pop(request_id))

    def _keep(self, name: str, keys: PrefixKeys) -> None:
        space = self._space()
        if space is not None:
            space.keep_conversation(keys, name, self._retain.seconds, self._retain.bytes)
