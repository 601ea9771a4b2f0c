"""The registration of one rank of prefill, renewed as long as its manager lives."""

import contextlib
from typing import Final

import msgspec

from kvstore.handoff.links import Ticker
from kvstore.handoff.registry import LEASE_S, RankRecord, RegistryClient
from kvstore.process.faults import Faults
from kvstore.protocol.errors import KVStoreError

_RENEWALS: Final = 4
"""In each lease."""
CLOSE_S = 2.0
"""Time limit of a renewal that is in progress when the lease is to end."""


class RankLease:
    """Registers at once, and renews the lease in a thread.

    Args:
        client: of the registry.
        record: of the rank; ``count`` and ``lease_s`` are set here.
        faults: told of registrations that fail; they are tried again.
    """

    def __init__(self, client: RegistryClient, record: RankRecord, faults: Faults) -> None:
        self._client = client
        self._record = record
        self._faults = faults
        self._count = 0
        self._renew()
        self._ticker = Ticker(self._renew, "kvstore-handoff-lease", LEASE_S / _RENEWALS)

    def close(self) -> None:
        """End the lease, now if the registry answers, else when it runs out."""
        if self._ticker.close(CLOSE_S):
            with contextlib.suppress(KVStoreError):
                self._register(0.0)

    def _renew(self) -> None:
        with contextlib.suppress(KVStoreError):
            self._register(LEASE_S)

    def _register(self, lease_s: float) -> None:
        self._count += 1
        record = msgspec.structs.replace(self._record, count=self._count, lease_s=lease_s)
        try:
            self._client.register(record)
        except KVStoreError as error:
            self._faults.note("registry", str(error))
            raise
