"""What is refused to whoever asks over HTTP: a status, a stable code, a message, the field."""

from typing import Final

from kvstore.errors import KVStoreError

STATUS: Final = {
    "invalid_argument": 400, "layout_mismatch": 400, "not_found": 404, "capacity": 409,
    "config": 400, "tier_unavailable": 503, "durability_unavailable": 409,
    "transfer_timeout": 503, "peer_unreachable": 503,
}  # fmt: skip
"""Code of an error of ours → HTTP status."""


class Refusal(Exception):
    """What is asked cannot be done; nothing has changed.

    Args:
        status: HTTP status.
        code: stable identifier, ``snake_case``.
        message: what is wrong and what to do.
        field: which part of the request is wrong; empty = none in particular.
    """

    def __init__(self, status: int, code: str, message: str, field: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.field = field

    @classmethod
    def of(cls, error: KVStoreError) -> "Refusal":
        """What an error of ours is to whoever asked."""
        field = getattr(error, "field", "")
        message = str(error).removeprefix(f"{field}: ") if field else str(error)
        return cls(STATUS.get(error.code, 500), error.code, message, field)
