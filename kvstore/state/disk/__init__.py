"""The disk side of the page table: the log, and every page on its way to it and back."""

__all__ = ["checks", "graves", "jobs", "loads", "log", "order", "pages"]
