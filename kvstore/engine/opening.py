"""Opens a space, with retries and back-off; logs one warning if the node refuses it."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.client.space import Space
from kvstore.client.store import KVStore
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.page import ShardSpec, SpaceIdentity

_LOG: Final = logging.getLogger(__name__)
_BACKOFF_S: Final = (1.0, 2.0, 5.0, 10.0, 30.0)


class Opening:
    """The space of one side of an adapter, or None while the node refuses it.

    Refusals are logged at ``log_level`` in ``log``.

    Attributes:
        troubles: error code → number of refusals, in addition to the store's own ``troubles``.
        log: the engine's log, for messages to operators.
    """

    def __init__(
        self,
        store: KVStore,
        identity: SpaceIdentity,
        shards: Sequence[ShardSpec],
        clock: Callable[[], float],
        log_level: int = logging.WARNING,
        log: logging.Logger = _LOG,
    ) -> None:
        self.troubles: Counter[str] = Counter()
        self.log = log
        self._store = store
        self._identity = identity
        self._shards = shards
        self._clock = clock
        self._log_level = log_level
        self._space: Space | None = None
        self._attempts = 0
        self._next = 0.0
        self._said = ""

    @property
    def connected(self) -> bool:
        """Whether the node is believed to be up."""
        return self._store.connected

    @property
    def node_name(self) -> str:
        """Name of the node; empty while unknown."""
        return self._store.node_name

    def get(self) -> Space | None:
        """The space; None = everything is a miss for now."""
        if self._space is not None:
            return self._space
        now = self._clock()
        if now < self._next:
            return None
        try:
            self._space = self._store.space(self._identity, self._shards)
        except KVStoreError as error:
            self._next = now + _BACKOFF_S[min(self._attempts, len(_BACKOFF_S) - 1)]
            self._attempts += 1
            self.troubles[error.code] += 1
            if str(error) != self._said:
                self._said = str(error)
                self.log.log(
                    self._log_level,
                    "the node refuses this engine's pages, all of them miss: %s (%s)",
                    error, error.code,
                )  # fmt: skip
        return self._space
