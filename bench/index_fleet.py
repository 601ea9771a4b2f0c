"""Which engine and which node has which prompts, for `python -m bench index`.

A fleet follows from its numbers alone, so the process that publishes its events and those that read
the index know the same without telling each other. It needs no more than numpy: the other indexers'
environments read it too.

Every worker has a part of some shared documents, each a different one, and then prompts of its own,
all of different length. A prompt is named by a number, from which its tokens and the engines' own
64-bit hashes follow; as in vLLM with a fixed seed, equal prefixes have equal hashes everywhere.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Kind = Literal["tokens", "keys"]

PREFILL_ENGINES: Final = 64
DECODE_ENGINES: Final = 64
NODES: Final = 64
PAGE_TOKENS: Final = 64
DOCUMENT_PAGES: Final = 2_048
"""A document has 131,072 tokens."""
DOCUMENTS: Final = 16
"""Of these every worker of a fleet that shares has some."""
DOCUMENTS_A_WORKER: Final = 2
VOCABULARY: Final = 151_936
"""Of Qwen3; with it a token has 4.1 bytes of msgpack on average."""
PROMPT_PAGES: Final = (16, 1_024)
_DOCUMENT: Final = 1 << 40
"""Numbers of documents begin here; those of other prompts are smaller."""


class Prompt(NamedTuple):
    """The head of a prompt.

    Attributes:
        number: names the prompt.
        pages: how much of it.
    """

    number: int
    pages: int

    @property
    def is_document(self) -> bool:
        """Whether it is one of the shared documents."""
        return self.number >= _DOCUMENT


class Worker(NamedTuple):
    """One engine or node.

    Attributes:
        place: in the fleet, from 0.
        name: its name.
        kind: engines publish ``tokens``, nodes ``keys``.
        pages: what it has at least, in all its prompts.
    """

    place: int
    name: str
    kind: Kind
    pages: int


class Fleet(NamedTuple):
    """The fleet of one case.

    Attributes:
        engines: how many, prefill and decode together.
        nodes: how many.
        pages: of all workers together.
        shared: whether workers have documents in common; else each page is at one worker only.
        seed: another fleet for another seed.
    """

    engines: int
    nodes: int
    pages: int
    shared: bool
    seed: int = 0

    def workers(self) -> list[Worker]:
        """All of them, engines first."""
        count = self.engines + self.nodes
        pages = max(self.pages // count, 1)
        prefill = self.engines // 2
        names = [f"engine/prefill-{at}" for at in range(prefill)]
        names += [f"engine/decode-{at}" for at in range(self.engines - prefill)]
        engines = [Worker(at, name, "tokens", pages) for at, name in enumerate(names)]
        nodes = [
            Worker(self.engines + at, f"node/node-{at}", "keys", pages) for at in range(self.nodes)
        ]
        return engines + nodes

    def prompts(self, worker: Worker) -> Iterator[Prompt]:
        """What a worker has, in the order in which it announces it; ``worker.pages`` in all."""
        random = np.random.default_rng((self.seed, worker.place))
        last = self.last(worker)
        left = worker.pages - last.pages
        if self.shared:
            first = _DOCUMENT + self.seed * DOCUMENTS
            chosen = random.choice(np.arange(1, DOCUMENTS), DOCUMENTS_A_WORKER - 1, replace=False)
            for document in (0, *chosen.tolist()):
                most = min(left // (2 * DOCUMENTS_A_WORKER), DOCUMENT_PAGES)
                if most:
                    pages = int(random.integers(1, most + 1))
                    yield Prompt(first + document, pages)
                    left -= pages
        number = (self.seed * 1_024 + worker.place) << 20
        yield from _own_prompts(number + 1, left, random)
        yield last

    def last(self, worker: Worker) -> Prompt:
        """The prompt that a worker announces at the end, a short one."""
        number = (self.seed * 1_024 + worker.place) << 20
        return Prompt(number, min(worker.pages, PROMPT_PAGES[0]))

    def document(self) -> Prompt:
        """The document that every worker of a fleet that shares has the beginning of."""
        return Prompt(_DOCUMENT + self.seed * DOCUMENTS, DOCUMENT_PAGES)


def _own_prompts(number: int, pages: int, random: np.random.Generator) -> Iterator[Prompt]:
    """Prompts with these pages in all, most of them short."""
    low, high = np.log(PROMPT_PAGES)
    while pages:
        some = min(pages, int(np.exp(random.uniform(low, high))))
        yield Prompt(number, some)
        pages -= some
        number += 1


def tokens(prompt: Prompt) -> npt.NDArray[np.uint32]:
    """Its tokens; shape (pages, PAGE_TOKENS)."""
    if prompt.is_document:
        return _document_tokens(prompt.number)[: prompt.pages]
    return _tokens(prompt.number, prompt.pages)


def hashes(prompt: Prompt) -> npt.NDArray[np.uint64]:
    """The engines' own hashes of its blocks; shape (pages,)."""
    pages = DOCUMENT_PAGES if prompt.is_document else prompt.pages
    random = np.random.default_rng((prompt.number, 1))
    return random.integers(1, 2**64, pages, dtype=np.uint64)[: prompt.pages]


@lru_cache(DOCUMENTS)
def _document_tokens(number: int) -> npt.NDArray[np.uint32]:
    return _tokens(number, DOCUMENT_PAGES)


def _tokens(number: int, pages: int) -> npt.NDArray[np.uint32]:
    random = np.random.default_rng(number)
    return random.integers(0, VOCABULARY, (pages, PAGE_TOKENS), dtype=np.uint32)
