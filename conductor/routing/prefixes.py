"""Looks up the usable prefix of a prompt at each engine in the index. Pure.

An engine can use pages in its own cache and on a node it reads from. Engines of one model may have
different page sizes and spaces; a prompt is hashed once for each such pair.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from conductor.routing.engines import EngineInfo, EngineRegistry
from conductor.routing.policy import Prefix, Waiting
from kvstore.index.holders import PrefixIndex, PromptMatch, prefix_length
from kvstore.page import PrefixKeys, page_keys


def engine_worker(engine_id: str) -> str:
    """An engine's name in the index."""
    return f"engine/{engine_id}"


def node_worker(node_id: str) -> str:
    """A node's name in the index."""
    return f"node/{node_id}"


@dataclass(slots=True)
class _Prompt:
    tokens: Sequence[int]
    keys: dict[int, PrefixKeys] = field(default_factory=dict)  # by page_tokens


class PrefixView:
    """Looks up prefixes for the scheduler.

    It keeps the prompt of a request from :meth:`remember` to :meth:`forget`.
    """

    def __init__(
        self,
        index: PrefixIndex,
        registry: EngineRegistry,
        is_current: Callable[[str], bool],
        *,
        needed: bool,
    ) -> None:
        """Connect the parts.

        Args:
            index: the prefix index.
            registry: the engines.
            is_current: whether the entries of a worker are up to date.
            needed: whether the policy uses prefixes at all.
        """
        self._index = index
        self._registry = registry
        self._is_current = is_current
        self._prompts: dict[int, _Prompt] = {}
        self.needed = needed

    def remember(self, number: int, tokens: Sequence[int]) -> None:
        """Keep a request's prompt until :meth:`forget`."""
        self._prompts[number] = _Prompt(tokens)

    def forget(self, number: int) -> None:
        """Discard a request's prompt, if any."""
        self._prompts.pop(number, None)

    def __call__(self, waiting: Waiting) -> Mapping[str, Prefix]:
        """The prefix at each engine of the model; empty if the prompt's tokens are unknown."""
        prompt = self._prompts.get(waiting.number)
        if prompt is None:
            return {}
        matches: dict[tuple[str, int], PromptMatch] = {}
        result: dict[str, Prefix] = {}
        for engine in self._registry.of_model(waiting.model):
            info = engine.info
            group = (info.domain, info.page_tokens)
            if group not in matches:
                keys = _keys(prompt, info.page_tokens)
                matches[group] = self._index.match(info.domain, keys.packed)
            result[info.id] = self._prefix(info, matches[group])
        return result

    def _prefix(self, info: EngineInfo, match: PromptMatch) -> Prefix:
        local = match.present(engine_worker(info.id))
        node = match.present(node_worker(info.node or ""))
        local &= self._is_current(engine_worker(info.id))
        node &= info.node is not None and self._is_current(node_worker(info.node))
        pages = (prefix_length(present) for present in (local, node, local | node))
        return Prefix(*(count * info.page_tokens for count in pages))


def _keys(prompt: _Prompt, page_tokens: int) -> PrefixKeys:
    keys = prompt.keys.get(page_tokens)
    if keys is None:
        keys = prompt.keys[page_tokens] = page_keys(prompt.tokens, page_tokens)
    return keys
