"""Pages of other nodes: which node has which pages, and fetches of them. Pure."""

__all__ = ["jobs", "located", "pages", "spreads"]
