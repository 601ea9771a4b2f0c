"""The verb ``kvstore quota``: limits of spaces, and what they use."""

import argparse

from msgspec import to_builtins
from rich.console import Console

from kvstore.cli import show
from kvstore.cli.decoding import Reply
from kvstore.cli.jobs import JOB_WAIT_S, SPACE, AddVerb
from kvstore.cli.names import SPACES_MAX
from kvstore.cli.numbers import size
from kvstore.cli.remote import Remote, path_of
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.sizes import rounded
from kvstore.server.answers import JobRow, QuotaList, QuotaRow, SpaceList


def add_quota(verb: AddVerb) -> None:
    """Add the verb."""
    quota = verb("quota", "show the limits of all spaces or of one, or set the limits of one",
                 _quota, quotas)  # fmt: skip
    quota.add_argument("space", nargs="?", help=f"{SPACE}; default: show all")
    quota.add_argument("--quota-bytes", type=size, metavar="SIZE",
                       help="maximum bytes; 0 = no quota; default: unchanged")  # fmt: skip
    quota.add_argument("--reserved-bytes", type=size, metavar="SIZE",
                       help="reserved bytes; 0 = none; default: unchanged")  # fmt: skip
    quota.add_argument("--tier", choices=["host", "ssd"], default="host",
                       help="tier that the limits apply to; default: host")  # fmt: skip


def _quota(node: Remote, at: argparse.Namespace) -> Reply[QuotaList] | Reply[JobRow]:
    asked = {"quota_bytes": at.quota_bytes, "reserved_bytes": at.reserved_bytes}
    limits = {name: size for name, size in asked.items() if size is not None}
    if not limits:
        return _shown(node, at.space)
    if at.space is None:
        raise InvalidArgument("space", "name the space whose limits to set")
    every = (one for one in node.get("/v1/quotas", QuotaList).value.quotas if one.tier == at.tier)
    before = next((one for one in every if one.space == at.space), None)
    body = {
        "quota_bytes": before.quota_bytes if before is not None else 0,
        "reserved_bytes": before.reserved_bytes if before is not None else 0,
        **limits, "tier": at.tier,
    }  # fmt: skip
    begun = node.send("PUT", path_of("quotas", at.space), JobRow, body)
    job = node.finished(begun, JOB_WAIT_S)
    return node.get("/v1/quotas", QuotaList) if job.value.state == "done" else job


def _shown(node: Remote, space: str | None) -> Reply[QuotaList]:
    """The limits that are set, and the spaces without limits, with what they use."""
    limits = node.get("/v1/quotas", QuotaList).value.quotas
    spaces = node.listed("spaces", "/v1/spaces", SpaceList, {}, SPACES_MAX).value.spaces
    limited = {(one.space, one.tier) for one in limits}
    rows = list(limits)
    for one in spaces:
        for tier, used_bytes in (("host", one.host_bytes), ("ssd", one.ssd_bytes)):
            if (one.space, tier) not in limited and (used_bytes or tier == "host"):
                rows.append(
                    QuotaRow(
                        space=one.space, tier=tier, quota_bytes=0, reserved_bytes=0,
                        used_bytes=used_bytes,
                    )
                )  # fmt: skip
    chosen = [one for one in rows if space is None or one.space == space]
    return Reply({"quotas": to_builtins(chosen)}, QuotaList)


def quotas(answer: QuotaList | JobRow, console: Console) -> None:
    """Limits of spaces, or the job that could not set them."""
    if isinstance(answer, JobRow):
        show.job(answer, console)
        return
    rows = (
        [one.space[:show.LABEL_DIGITS], one.tier, rounded(one.used_bytes),
         _limit(one.quota_bytes), _limit(one.reserved_bytes)]
        for one in answer.quotas
    )  # fmt: skip
    show.table(console, "limits", ("space", "tier", "used", "quota", "reserved"), rows)


def _limit(value: int) -> str:
    return rounded(value) if value else "none"
