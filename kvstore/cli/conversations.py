"""The verbs of ``kvstore`` for conversations whose pages are kept."""

import argparse
from typing import Final

from rich.console import Console

from kvstore.cli import show
from kvstore.cli.decoding import Reply
from kvstore.cli.jobs import SPACE, AddVerb, names_page
from kvstore.cli.numbers import seconds, size
from kvstore.cli.remote import Remote
from kvstore.protocol.sizes import rounded
from kvstore.server.answers import ConversationEnded, ConversationList, KeptPages

_CAUSES: Final = {
    "missing": "a page is not stored, or was evicted before",
    "bytes": "--max-bytes is reached",
    "budget": "admin.conversations_budget_bytes or admin.conversations_ssd_budget_bytes is reached,"
    " and no tenant or space keeps more than this one",
    "quota": "the quota of the space is reached",
    "conversations": "the node keeps no further conversation, and no space keeps more than this",
    "disk": "the SSDs accept no more pages at the moment",
}


def add_conversations(verb: AddVerb) -> None:
    """Add the verbs."""
    verb("conversations", "list the conversations whose pages are kept, and for how long",
         lambda node, _options: node.get("/v1/conversations", ConversationList),
         conversations)  # fmt: skip
    keep = verb("keep", "keep a page and all pages before it for a conversation", _keep,
                _kept)  # fmt: skip
    names_page(keep)
    keep.add_argument("conversation", help="name of the conversation, as the engines use it")
    keep.add_argument("--ttl", type=seconds(zero=False), default=3600.0, metavar="SECONDS",
                      help="how long to keep the pages; default: 3600")  # fmt: skip
    keep.add_argument("--max-bytes", type=size, default=0, metavar="SIZE",
                      help="maximum size of the kept pages; default: 0, no limit per"
                      " conversation")  # fmt: skip
    end = verb("end-conversation", "stop keeping the pages of a conversation",
               _end, _ended)  # fmt: skip
    end.add_argument("space", help=SPACE)
    end.add_argument("conversation",
                     help="name of the conversation, as listed by kvstore"
                     " conversations")  # fmt: skip


def conversations(answer: ConversationList, console: Console) -> None:
    """Conversations whose pages are kept."""
    rows = (
        [one.conversation, one.tier, one.space[:show.LABEL_DIGITS], one.pages,
         rounded(one.bytes), one.gave_way_pages, show.seconds(one.ends_in_s)]
        for one in answer.conversations
    )  # fmt: skip
    title = f"conversations: {rounded(answer.used_bytes)} of {rounded(answer.budget_bytes)}"
    title += f"; on SSD: {rounded(answer.ssd_used_bytes)} of {rounded(answer.ssd_budget_bytes)}"
    columns = ("conversation", "tier", "space", "pages", "bytes", "gave way", "ends in")
    show.table(console, title, columns, rows)


def _keep(node: Remote, at: argparse.Namespace) -> Reply[KeptPages]:
    body = {
        "space": at.space, "key": at.key, "conversation": at.conversation, "ttl_s": at.ttl,
        "bytes_max": at.max_bytes,
    }  # fmt: skip
    return node.send("POST", "/v1/conversations", KeptPages, body)


def _kept(answer: KeptPages, console: Console) -> None:
    said = f"{answer.conversation}: {answer.pages} pages are kept"
    said += f" for {show.seconds(answer.ends_in_s)}"
    if cause := answer.cause:
        said += f"; the others may be evicted: {_CAUSES.get(cause, cause)} ({cause})"
    _say(said, console)


def _end(node: Remote, at: argparse.Namespace) -> Reply[ConversationEnded]:
    body = {"space": at.space, "conversation": at.conversation}
    return node.send("POST", "/v1/conversations/end", ConversationEnded, body)


def _ended(answer: ConversationEnded, console: Console) -> None:
    was = f"{answer.pages} pages may now be evicted" if answer.pages else "was not kept"
    _say(f"{answer.conversation}: {was}", console)


def _say(said: str, console: Console) -> None:
    console.print(said, markup=False, highlight=False, soft_wrap=True)
