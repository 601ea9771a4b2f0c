"""Operations that show what is kept: pins, conversations, quotas and reservations."""

from collections.abc import Callable
from time import monotonic_ns
from typing import Any, Final

from kvstore.config import AdminConfig
from kvstore.server import answers, operations
from kvstore.server.turns import Work
from kvstore.state.choice.quotas import Pin, Quotas
from kvstore.state.table.keeping import Keeping
from kvstore.state.table.pages import PageTable

_STEP_ROWS: Final = 64
_NS_PER_S: Final = 1_000_000_000


class KeptViews:
    """Lists of what is kept from eviction.

    Args:
        table: the pages; never changed.

    Attributes:
        handlers: operation → its implementation.
    """

    def __init__(self, table: PageTable) -> None:
        self._table = table
        self.handlers: dict[type[operations.Operation], Callable[[Any], Work[Any]]] = {
            operations.ListPins: self.pins,
            operations.ListConversations: self.conversations,
            operations.ListQuotas: self.quotas,
        }

    def pins(self, _asked: operations.ListPins) -> Work[answers.PinList]:
        """All pins."""
        pins = self._table.keeping.pins
        rows: list[answers.PinRow] = []
        for pin in list(pins):
            rows.append(_pin_row(pin))
            if len(rows) % _STEP_ROWS == 0:
                yield None
        return answers.PinList(
            pins=rows, used_bytes=pins.used_bytes, budget_bytes=pins.budget_bytes,
            ssd_used_bytes=pins.disk_used_bytes, ssd_budget_bytes=pins.disk_budget_bytes,
        )  # fmt: skip

    def conversations(self, _asked: operations.ListConversations) -> Work[answers.ConversationList]:
        """All conversations whose pages are kept."""
        kept = self._table.keeping.conversations
        rows: list[answers.ConversationRow] = []
        for one in list(kept):
            ends_in_s = max(0.0, (one.expires_ns - monotonic_ns()) / _NS_PER_S)
            rows.append(
                answers.ConversationRow(
                    conversation=one.name,
                    space=one.space.label,
                    tier=one.tier,
                    pages=len(one.nodes),
                    bytes=one.size_bytes,
                    gave_way_pages=one.gave_way,
                    ends_in_s=ends_in_s,
                )
            )
            if len(rows) % _STEP_ROWS == 0:
                yield None
        return answers.ConversationList(
            conversations=rows, used_bytes=kept.used_bytes, budget_bytes=kept.budget_bytes,
            ssd_used_bytes=kept.disk_used_bytes, ssd_budget_bytes=kept.disk_budget_bytes,
        )  # fmt: skip

    def quotas(self, _asked: operations.ListQuotas) -> Work[answers.QuotaList]:
        """All limits."""
        yield from ()
        rows = [
            answers.QuotaRow(
                space=one.space.label, tier=tier, quota_bytes=one.quota_bytes,
                reserved_bytes=one.reserved_bytes, used_bytes=quotas.used(one.space),
            )
            for tier, quotas in limits_of(self._table).items()
            for one in quotas.all()
        ]  # fmt: skip
        return answers.QuotaList(quotas=rows)

    # ---- explaining -------------------------------------------------------------------------


def set_budgets(keeping: Keeping, admin: AdminConfig, capacity_bytes: int) -> None:
    """Set what may be kept in memory of so many bytes, and for how long."""
    keeping.ttl_ns_max = admin.conversations_s_max * _NS_PER_S
    quarter = capacity_bytes // 4
    keeping.pins.budget_bytes = admin.pin_budget_bytes or quarter
    keeping.conversations.budget_bytes = admin.conversations_budget_bytes or quarter


def set_disk_budgets(keeping: Keeping, admin: AdminConfig, capacity_bytes: int) -> None:
    """Set what may be kept on SSDs of so many bytes."""
    quarter = capacity_bytes // 4
    keeping.pins.disk_budget_bytes = admin.pin_ssd_budget_bytes or quarter
    keeping.conversations.disk_budget_bytes = admin.conversations_ssd_budget_bytes or quarter


def limits_of(table: PageTable) -> dict[str, Quotas]:
    """The limits of spaces in each tier."""
    quotas, disk = {"host": table.quotas}, table.disk
    return quotas if not disk.exists else {**quotas, "ssd": disk.limits.quotas}


def _pin_row(pin: Pin) -> answers.PinRow:
    ends_in_s = (pin.expires_ns - monotonic_ns()) / _NS_PER_S if pin.expires_ns else None
    return answers.PinRow(
        pin=pin.number, space=pin.space.label, key=pin.key.hex(), tier=pin.tier,
        pages=pin.pages, bytes=pin.size_bytes, ends_in_s=ends_in_s,
    )  # fmt: skip
