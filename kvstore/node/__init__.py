"""One node: its decisions on each message, and the desk that carries them out."""

__all__ = ["describe", "desk", "movements", "node", "requests", "ssd"]
