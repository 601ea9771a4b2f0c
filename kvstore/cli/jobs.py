"""The verbs that start a job: waiting for it, and those that copy pages to other nodes."""

import argparse
import sys
from collections.abc import Callable
from typing import Any, Final

from rich.console import Console

from kvstore.cli import show
from kvstore.cli.decoding import Reply
from kvstore.cli.names import PREFIX_MIN
from kvstore.cli.numbers import count, seconds, size
from kvstore.cli.remote import Remote
from kvstore.protocol.errors import PeerUnreachable
from kvstore.server.answers import JobRow

Verb = Callable[[Remote, argparse.Namespace], Reply[Any]]
Show = Callable[[Any, Console], None]
AddVerb = Callable[[str, str, Verb, Show], argparse.ArgumentParser]
"""Adds a verb: its name, its summary, its request, and what shows the answer."""

SPACE: Final = f"model of the space, or {PREFIX_MIN} or more hex digits of its label"
KEY: Final = f"64 hex digits, or the first {PREFIX_MIN} or more"
JOB_WAIT_S: Final = 3600.0
COPY_JOBS: Final = ("replicate", "move-to-node", "drain")
"""Kinds of jobs that fail their command if they are not complete: a node may be stopped next."""


def names_page(verb: argparse.ArgumentParser) -> None:
    """Add the arguments that name one page."""
    verb.add_argument("space", help=SPACE)
    verb.add_argument("key", help=KEY)


def waits(verb: argparse.ArgumentParser) -> None:
    """Add the option not to wait for a job."""
    verb.add_argument("--no-wait", action="store_true", help="start the job and return at once")


def job_of(node: Remote, at: argparse.Namespace, body: dict[str, Any]) -> Reply[JobRow]:
    """Start the job of a verb, and wait for its end."""
    job = node.send("POST", f"/v1/{at.verb}", JobRow, body)
    try:
        return job if at.no_wait else node.finished(job, JOB_WAIT_S)
    except (KeyboardInterrupt, PeerUnreachable):
        number = job.value.job
        sys.stderr.write(
            f"kvstore: job {number} continues; stop it: kvstore jobs {number} --cancel\n"
        )
        raise


def add_copies(verb: AddVerb) -> None:
    """Add the verbs that copy pages to other nodes of a cluster."""
    for name, summary in (
        ("replicate", "copy a page and all pages before it to other nodes of the cluster"),
        (
            "move-to-node",
            "copy a page and all pages before it to another node, then drop them here",
        ),
        ("drain", "copy all pages of this node to the other nodes of the cluster"),
    ):
        made = verb(name, summary, _copied, show.job)
        if name != "drain":
            names_page(made)
        if name == "replicate":
            made.add_argument(
                "--copies", type=count(2), default=2, metavar="N",
                help="number of nodes that should have the pages, including this one; default: 2",
            )  # fmt: skip
        if name == "move-to-node":
            made.add_argument("--node", help="name of the other node; default: this node chooses")
        if name == "drain":
            made.add_argument(
                "--bytes-per-second", type=size, default=0, metavar="SIZE",
                help="bandwidth limit; default: no limit",
            )  # fmt: skip
        limit_s = 600.0 if name == "drain" else 60.0
        made.add_argument(
            "--deadline", type=seconds(zero=False), default=limit_s, metavar="SECONDS",
            help=f"stop after this time; default: {limit_s:.0f}",
        )  # fmt: skip
        waits(made)


def _copied(node: Remote, at: argparse.Namespace) -> Reply[JobRow]:
    body: dict[str, Any] = {"deadline_s": at.deadline}
    if at.verb == "drain":
        return job_of(node, at, {**body, "bytes_per_s": at.bytes_per_second})
    body |= {"space": at.space, "key": at.key}
    more = {"copies": at.copies} if at.verb == "replicate" else {"node": at.node}
    return job_of(node, at, body | more)
