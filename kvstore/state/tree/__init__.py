"""The page index: slots, prefix trees, spaces, and the sessions that use them."""

__all__ = [
    "actions", "children", "columns", "match", "node", "nodeheap", "places", "prefix_tree",
    "sessions", "slots", "story",
]  # fmt: skip
