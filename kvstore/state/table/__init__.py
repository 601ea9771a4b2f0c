"""The page table: where every page is, and what happens to it."""

__all__ = [
    "adopt", "ahead", "announce", "deadlines", "invariants", "keeping", "pages", "residents",
    "runs", "slab",
]  # fmt: skip
