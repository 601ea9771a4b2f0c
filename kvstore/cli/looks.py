"""The verbs of ``kvstore`` that change nothing, and the request that each sends."""

import argparse
import json
from pathlib import Path

from kvstore.cli import show
from kvstore.cli.decoding import Reply
from kvstore.cli.index import asked_index, index
from kvstore.cli.jobs import (
    KEY,
    SPACE,
    AddVerb,
    names_page,
)
from kvstore.cli.names import SPACES_MAX
from kvstore.cli.nodes import nodes
from kvstore.cli.numbers import count, seconds
from kvstore.cli.remote import Remote, path_of
from kvstore.protocol.counts import NodeList, NodeStats, TierList
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.explanation import Explanation
from kvstore.server.answers import (
    Configuration,
    PageDetail,
    PageList,
    PinList,
    PromptPart,
    SessionList,
    SpaceList,
)


def add_looks(verb: AddVerb) -> None:
    """The verbs that change nothing."""
    verb("stats", "show hit rate, memory use, spaces and sessions",
         lambda node, _options: node.get("/v1/stats", NodeStats), show.stats)  # fmt: skip
    verb("sessions", "list the engines and what they hold",
         lambda node, _options: node.get("/v1/sessions", SessionList), show.sessions)  # fmt: skip
    verb("nodes", "list the other nodes of the cluster and what was read from them",
         lambda node, _options: node.get("/v1/nodes", NodeList), nodes)  # fmt: skip
    verb("tiers", "show the tiers, their sizes and their state",
         lambda node, _options: node.get("/v1/tiers", TierList), show.tiers)  # fmt: skip
    verb("config", "show every setting, its value and its source",
         lambda node, _options: node.get("/v1/config", Configuration), show.config)  # fmt: skip
    verb("pins", "list the pins set by operators",
         lambda node, _options: node.get("/v1/pins", PinList), show.pins)  # fmt: skip
    verb("index", "show the state of a Conductor's index; --url names the Conductor",
         lambda remote, _options: asked_index(remote), index)  # fmt: skip
    verb("spaces", "list the spaces and their limits",
         lambda node, _options: node.listed("spaces", "/v1/spaces", SpaceList, {}, SPACES_MAX),
         show.spaces)  # fmt: skip
    pages = verb("pages", "list the pages of a space", _pages, show.pages)
    pages.add_argument("space", help=SPACE)
    pages.add_argument("--prefix", metavar="KEY", help="only this page and its descendants")
    pages.add_argument("--tier", choices=["host", "ssd"], help="only pages in this tier")
    for bound, compared in (("min", "at least"), ("max", "at most")):
        pages.add_argument(f"--age-{bound}", type=seconds(zero=True), metavar="SECONDS",
                           help=f"only pages stored {compared} this long ago")  # fmt: skip
        pages.add_argument(f"--hits-{bound}", type=count(0), metavar="N",
                           help=f"only pages with {compared} this many hits")  # fmt: skip
    pages.add_argument("--limit", type=count(1), default=100, help="maximum pages; default: 100")
    page = verb("page", "show the details of one page", _page, show.page)
    tokens = verb("tokens", "show the token ids of a page; needs the operate role", _page_tokens,
                  show.tokens)  # fmt: skip
    names_page(tokens)
    tokens.add_argument("--pages", type=count(1), default=1,
                        help="number of pages, ending with this one; default: 1")  # fmt: skip
    tree = verb("tree", "show the descendants of a page", _tree, show.tree)
    tree.add_argument("space", help=SPACE)
    tree.add_argument("key", nargs="?", help=f"{KEY}; default: the whole space")
    tree.add_argument("--depth", type=count(1), default=8, help="number of levels; default: 8")
    tree.add_argument("--limit", type=count(1), default=100,
                      help="maximum pages; default: 100")  # fmt: skip
    explain = verb("explain", "say why a key or prompt is a hit or a miss", _explain,
                   show.explanation)  # fmt: skip
    explain.add_argument("key", nargs="?", help=KEY)
    explain.add_argument("--tokens", help="token ids such as 1,2,3, or @FILE with a JSON list")
    explain.add_argument("--space", help=f"{SPACE}; default: the space that matches best")
    explain.add_argument("--shard", type=count(0), help="shard number; default: any")
    names_page(page)


def _pages(node: Remote, at: argparse.Namespace) -> Reply[PageList]:
    query = {
        "space": at.space, "prefix": at.prefix, "tier": at.tier, "age_min_s": at.age_min,
        "age_max_s": at.age_max, "hits_min": at.hits_min, "hits_max": at.hits_max,
    }  # fmt: skip
    return node.listed("pages", "/v1/pages", PageList, query, at.limit)


def _page(node: Remote, at: argparse.Namespace) -> Reply[PageDetail]:
    return node.get(path_of("pages", at.space, at.key), PageDetail)


def _page_tokens(node: Remote, at: argparse.Namespace) -> Reply[PromptPart]:
    return node.get(path_of("pages", at.space, at.key, "tokens"), PromptPart, pages=at.pages)


def _tree(node: Remote, at: argparse.Namespace) -> Reply[PageList]:
    query = {"space": at.space, "key": at.key, "depth": at.depth}
    return node.listed("pages", "/v1/tree", PageList, query, at.limit)


def _explain(node: Remote, at: argparse.Namespace) -> Reply[Explanation]:
    body = {"key": at.key, "space": at.space, "shard": at.shard}
    if at.tokens is not None:
        body["tokens"] = _tokens(at.tokens)
    given = {k: v for k, v in body.items() if v is not None}
    return node.send("POST", "/v1/explain", Explanation, given)


def _tokens(text: str) -> list[int]:
    """Token ids from the option, or from a file."""
    if not text.startswith("@"):
        try:
            return [int(part) for part in text.split(",")]
        except ValueError as error:
            message = f"{text[:80]!r} is not a list of token ids such as 1,2,3"
            raise InvalidArgument("--tokens", message) from error
    try:
        found = json.loads(Path(text[1:]).read_text())
    except OSError as error:
        raise InvalidArgument("--tokens", f"{text[1:]}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidArgument("--tokens", f"{text[1:]} is not JSON: {error}") from error
    if not (isinstance(found, list) and all(type(one) is int for one in found)):
        message = f"{text[1:]} is not a JSON list of token ids such as [1, 2, 3]"
        raise InvalidArgument("--tokens", message)
    return found
