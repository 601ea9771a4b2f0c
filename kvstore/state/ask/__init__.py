"""Questions to the state, and walks over it in steps."""

__all__ = ["explain", "inventory", "traversal"]
