"""The verbs of the command ``kvstore``, and the request that each sends to a node."""

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from kvstore.cli import show, top
from kvstore.cli.conversations import add_conversations
from kvstore.cli.decoding import Reply
from kvstore.cli.jobs import (
    COPY_JOBS,
    KEY,
    SPACE,
    AddVerb,
    Show,
    Verb,
    add_copies,
    job_of,
    names_page,
    waits,
)
from kvstore.cli.looks import add_looks
from kvstore.cli.names import Names
from kvstore.cli.numbers import count, seconds
from kvstore.cli.quotas import add_quota
from kvstore.cli.remote import Remote
from kvstore.cli.vllm_flags import asked_flags, vllm_flags
from kvstore.config.machine import version_of
from kvstore.protocol.counts import NodeStats
from kvstore.protocol.errors import ConfigError, InvalidArgument, KVStoreError, NotFound
from kvstore.server.answers import (
    JobList,
    JobRow,
    Pinned,
    Policy,
    PolicySet,
    Unpinned,
)
from kvstore.server.client import is_address
from kvstore.server.environment import cli_defaults

_INTERVAL_MAX_S: Final = 3600.0


class _Parser(argparse.ArgumentParser):
    """Suggests the nearest verb for an unknown one."""

    verbs: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        """See :class:`argparse.ArgumentParser`."""
        wrong = re.match(r"argument VERB: invalid choice: '(.*?)'", message)
        if wrong is not None:
            near = difflib.get_close_matches(wrong[1], self.verbs, n=1)
            hint = f"did you mean {near[0]}?" if near else "kvstore --help lists them"
            message = f"{wrong[1]!r} is not a verb; {hint}"
        elif message.endswith("required: VERB"):
            message = "name a verb; kvstore --help lists them"
        super().error(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status: 0 done, 1 failed, 2 wrong command line."""
    try:
        status = _carried_out(_parser().parse_args(arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the pipe has closed it (kvstore pages … | head)
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return 1
    except OSError as error:  # such as a full disk that the output goes to
        with Path(os.devnull).open("w") as nowhere:  # what is left of it is not written at the exit
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        sys.stderr.write(f"kvstore: {error}\n")
        return 1
    except (ConfigError, InvalidArgument) as error:
        sys.stderr.write(f"kvstore: {error}\n")
        return 1 if isinstance(error, NotFound) else 2
    except KVStoreError as error:
        sys.stderr.write(f"kvstore: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _carried_out(options: argparse.Namespace) -> int:
    """Send the request and print the answer; returns the exit status."""
    node = Remote(options.url, options.token)
    if options.verb == "doctor":
        # It imports what a node is made of; the other verbs answer sooner without.
        from kvstore.cli import doctor

        return doctor.run(
            options.url, options.token, options.directory, options.config, show.console(),
            as_json=options.json, conductor=options.conductor,
        )  # fmt: skip
    if options.verb == "top":
        return top.run(node, once=options.once, as_json=options.json, seconds=options.interval)
    _spell_out(Names(node), options)
    reply: Reply[Any] = options.ask(node, options)
    if options.json:
        sys.stdout.write(json.dumps(reply.raw, indent=2) + "\n")
    else:
        options.show(reply.value, show.console())
    return int(reply.kind is JobRow and _fell_short(reply.value))


def _fell_short(job: JobRow) -> bool:
    """Whether a job failed, was cancelled, or could not copy all of the pages."""
    if job.state in ("failed", "cancelled"):
        return True
    copies = job.state == "done" and job.kind in COPY_JOBS
    return copies and job.result.get("complete") is False


def _spell_out(names: Names, options: argparse.Namespace) -> None:
    """Replace short names in the options by full ones."""
    given = vars(options)
    if given.get("space") is not None:
        options.space = names.space(options.space)
    for name in ("key", "prefix"):
        if given.get(name) is not None:
            setattr(options, name, names.key(options.space, given[name]))
    if given.get("keys"):
        options.keys = [names.key(options.space, key) for key in options.keys]


def _anywhere(**defaults: Any) -> _Parser:
    """The options that may be given before the verb (with defaults) or after it."""
    unset = argparse.SUPPRESS
    shared = _Parser(add_help=False)
    shared.add_argument("--url", default=defaults.get("url", unset),
                        help="http://HOST:PORT, or unix:// and the path of the node's admin socket"
                        " (or KVSTORE_URL); default: the node of this machine;"
                        " for index: the Conductor's http://HOST:PORT")  # fmt: skip
    shared.add_argument("--token", default=defaults.get("token", unset),
                        help="bearer token for an http address (or KVSTORE_TOKEN, or the file named"
                        " by KVSTORE_TOKEN_FILE)")  # fmt: skip
    shared.add_argument("--json", action="store_true", default=defaults.get("json", unset),
                        help="print JSON instead of tables")  # fmt: skip
    return shared


def _parser() -> argparse.ArgumentParser:
    url, token = cli_defaults()
    parser = _Parser(
        prog="kvstore", description="Inspect and operate a node.",
        parents=[_anywhere(url=url, token=token, json=False)],
    )  # fmt: skip
    version = f"kvstore {version_of()}"
    parser.add_argument("--version", action="version", version=version)
    shared = _anywhere()
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, summary: str, ask: Verb, shown: Show) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=summary, description=summary, parents=[shared])
        made.set_defaults(ask=ask, show=shown)
        return made

    add_looks(verb)
    _add_changes(verb)
    _add_jobs(verb)
    add_conversations(verb)
    verb("vllm-flags", "print the flags that connect vLLM to this node",
         lambda node, _options: asked_flags(node), vllm_flags)  # fmt: skip
    live = verb("top", "show live rates and sizes", _nothing, show.anything)
    live.add_argument("--once", action="store_true", help="print once and exit")
    live.add_argument("--interval", type=seconds(zero=False, most=_INTERVAL_MAX_S), default=1.0,
                      metavar="SECONDS", help="time between updates; default: 1")  # fmt: skip
    ill = verb("doctor", "check whether this machine can run a node", _nothing, show.anything)
    ill.add_argument("--directory", type=Path,
                     help="test this directory for an SSD tier; default: those of --config, else"
                     " those of the running node, else the current one")  # fmt: skip
    ill.add_argument("--config", type=Path,
                     help="TOML file of a node: check that this machine can run it")  # fmt: skip
    ill.add_argument("--conductor", type=_http, metavar="URL",
                     help="also check which engines and nodes this Conductor ignores, and"
                     " why")  # fmt: skip
    parser.verbs = list(verbs.choices)
    return parser


def _http(text: str) -> str:
    if not text.startswith(("http://", "https://")) or not is_address(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not http://HOST:PORT")
    return text.rstrip("/")


def _add_changes(verb: AddVerb) -> None:
    """The verbs that need the operate role and are done at once."""
    pin = verb("pin", "protect a page and all pages before it from eviction", _pin, show.anything)
    names_page(pin)
    pin.add_argument("--ttl", type=seconds(zero=True), default=3600.0, metavar="SECONDS",
                     help="duration of the pin; 0 = until unpin; default: 3600")  # fmt: skip
    pin.add_argument("--tier", choices=["host", "ssd"], default="host",
                     help="tier in which the pages are kept; default: host")  # fmt: skip
    unpin = verb("unpin", "end a pin", _unpin, show.anything)
    unpin.add_argument("pin", type=count(1), help="pin number, as listed by kvstore pins")
    add_quota(verb)
    policy = verb("policy", "show or change the eviction policy", _policy, show.anything)
    policy.add_argument(
        "name", nargs="?", help="new policy, in effect until the node restarts; default: show"
    )


def _add_jobs(verb: AddVerb) -> None:
    """The verbs that start a job and wait for it, and the one that shows jobs."""
    for name, summary in (
        ("evict", "remove a page and its descendants, or a whole space, from memory and the SSDs"),
        ("verify", "read stored pages and check their digests"),
    ):
        made = verb(name, summary, _bulk, show.job)
        made.add_argument("space", nargs="?" if name == "verify" else None, help=SPACE)
        made.add_argument("key", nargs="?", help=f"{KEY}; default: the whole space")
        waits(made)
        if name == "verify":
            made.add_argument("--tier", choices=["host", "ssd"], help="tier to read; default: all")
            made.add_argument(
                "--deadline", type=seconds(zero=False), default=3600.0, metavar="SECONDS",
                help="stop after this time; default: 3600",
            )  # fmt: skip
    clear = verb(
        "clear",
        "remove every page of a space, or of all spaces, from memory and the SSDs, including"
        " records on disk that are no longer indexed",
        _clear, show.job,
    )  # fmt: skip
    clear.add_argument("space", nargs="?", help=SPACE)
    clear.add_argument("--all", action="store_true", help="every space")
    clear.add_argument("--yes", action="store_true", help="do not ask for confirmation of --all")
    waits(clear)
    for name, summary in (
        ("prefetch", "load pages from the SSD tier into host memory"),
        ("move", "move pages to another tier"),
    ):
        made = verb(name, summary, _moved, show.job)
        made.add_argument("space", help=SPACE)
        made.add_argument("keys", nargs="+", metavar="KEY", help="keys of one prompt, in order")
        made.add_argument("--deadline", type=seconds(zero=False), default=60.0, metavar="SECONDS",
                          help="stop after this time; default: 60")  # fmt: skip
        if name == "move":
            made.add_argument("--to", choices=["host", "ssd"], default="ssd",
                              help="target tier (default: ssd); descendants are moved"
                              " first")  # fmt: skip
        waits(made)
    add_copies(verb)
    jobs = verb("jobs", "show all jobs, or one job", _jobs, show.jobs)
    jobs.add_argument("job", type=count(1), nargs="?", help="job number; default: all")
    jobs.add_argument(
        "--cancel", action="store_true", help="cancel the job; its changes are not undone"
    )


# The request of each verb


def _nothing(_node: Remote, _options: argparse.Namespace) -> Reply[None]:
    return Reply(None, type(None))


def _pin(node: Remote, at: argparse.Namespace) -> Reply[Pinned]:
    body = {"space": at.space, "key": at.key, "ttl_s": at.ttl, "tier": at.tier}
    return node.send("POST", "/v1/pins", Pinned, body)


def _unpin(node: Remote, at: argparse.Namespace) -> Reply[Unpinned]:
    return node.send("DELETE", f"/v1/pins/{at.pin}", Unpinned)


def _policy(node: Remote, at: argparse.Namespace) -> Reply[Policy] | Reply[PolicySet]:
    if at.name is None:
        return node.get("/v1/policy", Policy)
    return node.send("PUT", "/v1/policy", PolicySet, {"name": at.name})


def _bulk(node: Remote, at: argparse.Namespace) -> Reply[JobRow]:
    body = {"space": at.space, "key": at.key}
    if at.verb == "verify":
        body |= {"tier": at.tier, "deadline_s": at.deadline}
    return job_of(node, at, {k: v for k, v in body.items() if v is not None})


def _clear(node: Remote, at: argparse.Namespace) -> Reply[JobRow]:
    if (at.space is None) != at.all:
        raise InvalidArgument("space", "name a space to empty, or --all")
    if at.all and not at.yes:
        _confirm(node)
    return job_of(node, at, {"space": at.space, "all": at.all})


def _confirm(node: Remote) -> None:
    """Ask for confirmation before all pages of a node are removed.

    Raises:
        InvalidArgument: this is not a terminal.
        KVStoreError: the answer is no.
    """
    # A stream that was closed before the start (<&-) is None.
    if not all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr)):
        raise InvalidArgument("--all", "add --yes to empty every space of the node")
    stats = node.get("/v1/stats", NodeStats).value
    sys.stderr.write(
        f"Remove all {stats.pages:,} pages of {len(stats.spaces)} spaces from node"
        f" {show.cell(stats.node)}? [y/N] "
    )
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise KVStoreError("nothing was done")


def _moved(node: Remote, at: argparse.Namespace) -> Reply[JobRow]:
    body = {"space": at.space, "keys": at.keys, "deadline_s": at.deadline}
    return job_of(node, at, {**body, "to": at.to} if at.verb == "move" else body)


def _jobs(node: Remote, at: argparse.Namespace) -> Reply[JobList]:
    if at.job is None and at.cancel:
        raise InvalidArgument("job", "name the job to cancel; see kvstore jobs")
    if at.job is None:
        return node.get("/v1/jobs", JobList)
    job = node.send("DELETE" if at.cancel else "GET", f"/v1/jobs/{at.job}", JobRow)
    return Reply({"jobs": [job.raw]}, JobList)
