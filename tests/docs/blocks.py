"""The fenced blocks of README.md and the documentation, and what their first line says of them.

The word behind the fence is the language, and says what a test does with the block:

* ``sh`` and ``python`` are run, each in a folder, namespaces and a network of its own.
* ``toml``, ``json``, ``ini`` and ``yaml`` are read; ``toml`` must be a configuration of ours.
* ``text`` is a picture or an output.

Further words: ``with-node`` = a node runs at its default address; ``until: TEXT`` = it runs on for
ever, and is ended once it has said this; ``not-run: REASON`` = one of :data:`REASONS`. What stands
behind ``# prints:`` in a block must be in its output, in this order.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LANGUAGES: Final = {"sh", "python", "toml", "json", "ini", "yaml", "text"}
REASONS: Final = {
    "changes the machine": "what it does is tried by hand, and its parts by tests/deploy",
    "needs a container engine": "tests/deploy looks at the files that it uses",
    "needs a network": "it installs packages",
    "needs etcd": "make test-cluster looks at the same keys with another client",
    "needs Redis": "likewise",
    "needs Mooncake": "tests/cluster_processes/handoff_mooncake_scene.py has the same calls",
    "needs vLLM": "make test-vllm runs the same with real engines",
    "takes minutes": "make targets and measurements",
}
"""Why a block may go without being run, and what looks at it instead."""

_BLOCK: Final = re.compile(r"^( *)(```|~~~)(.*)\n((?:.*\n)*?)\1\2 *$", re.MULTILINE)
_PRINTS: Final = re.compile(r"# prints: (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One block.

    Attributes:
        path: of its file, from the root of the project.
        line: where it begins there.
        language: how it is to be taken.
        with_node: it wants a node at the default address.
        until: it is ended when it has said so; empty = it ends by itself.
        not_run: why it is not run; empty = it is.
        text: what is in it.
    """

    path: Path
    line: int
    language: str
    with_node: bool
    until: str
    not_run: str
    text: str

    @property
    def prints(self) -> list[str]:
        """What its output must have."""
        return [one.strip() for one in _PRINTS.findall(self.text)]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


def blocks_of(root: Path, path: Path) -> list[Block]:
    """The blocks of a file."""
    text, found = path.read_text(), []
    for match in _BLOCK.finditer(text):
        indent, _, info, inside = match.groups()
        word, _, rest = info.strip().partition(" ")
        plain, _, not_run = rest.partition("not-run: ")
        plain, _, until = plain.partition("until: ")
        found.append(
            Block(
                path.relative_to(root), text.count("\n", 0, match.start()) + 1, word,
                "with-node" in plain.split(), until.strip(), not_run.strip(),
                "\n".join(line.removeprefix(indent) for line in inside.splitlines()) + "\n",
            )
        )  # fmt: skip
    return found
