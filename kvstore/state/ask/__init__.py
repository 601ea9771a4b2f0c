"""Questions to the state, and walks over it in steps."""

__all__ = ["describe", "explain", "explanation", "inventory", "traversal"]
