"""A small world, and questions to it about its pages."""

from kvstore.protocol.explanation import VERDICTS, Explanation
from kvstore.state.ask.explain import Explainer
from kvstore.state.tree.prefix_tree import PrefixTree
from tests.state.world import FULL, FULL_2, World, ended, identity, key

SECOND = 1_000_000_000


class Asked:
    """A small world, and questions to it at second 100."""

    def __init__(self) -> None:
        self.world = World(extents=1, slots_each=4)
        self.table = self.world.table
        self.process = self.world.process()
        self.space = self.world.space(self.process, (FULL, FULL_2))
        self.table.moment.now_ns = 90 * SECOND

    def other(self, **fields: str) -> PrefixTree:
        return self.table.spaces.open(self.process.session, identity(**fields), [FULL])[0]

    def why(
        self, path: str, space: PrefixTree | None = None, shard: int | None = None
    ) -> Explanation:
        explainer = Explainer(self.table, 100 * SECOND)
        found = ended(explainer.steps(key(path), space or self.space, shard))
        assert found.verdict in VERDICTS
        assert found.text
        return found
