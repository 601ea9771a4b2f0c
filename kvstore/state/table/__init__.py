"""The page table: where every page is, and what happens to it."""
