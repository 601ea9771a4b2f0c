"""Adapters of engines: one package each, independent of each other."""

__all__: list[str] = []
