"""The protocol of engines, nodes and operators: names of pages, errors and messages.

Everything else in ``kvstore`` may import it, and it imports nothing of ``kvstore``.
"""

__all__ = ["counts", "errors", "layout", "page", "wire"]
