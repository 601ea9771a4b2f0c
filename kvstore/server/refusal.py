"""Refusals of HTTP requests: a status, a stable code, a message, the field."""

from typing import Final

from kvstore.protocol.errors import KVStoreError

STATUS: Final = {
    "invalid_argument": 400, "layout_mismatch": 400, "not_found": 404, "capacity": 409,
    "config": 400, "tier_unavailable": 503, "durability_unavailable": 409,
    "transfer_timeout": 503, "peer_unreachable": 503,
}  # fmt: skip
"""Error code → HTTP status."""


class Refusal(Exception):
    """A request was refused; nothing has changed.

    Args:
        status: HTTP status.
        code: stable identifier, ``snake_case``.
        message: what is wrong and what to do.
        field: name of the wrong field; empty if no single field is wrong.
    """

    def __init__(self, status: int, code: str, message: str, field: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.field = field

    @classmethod
    def of(cls, error: KVStoreError) -> "Refusal":
        """Convert an error of kvstore."""
        field = getattr(error, "field", "")
        message = str(error).removeprefix(f"{field}: ") if field else str(error)
        return cls(STATUS.get(error.code, 500), error.code, message, field)
