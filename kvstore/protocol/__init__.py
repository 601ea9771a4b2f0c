"""The protocol of engines, nodes and operators: names of pages, errors, messages and answers.

Everything else in ``kvstore`` may import it, and it imports nothing of ``kvstore``.
"""

__all__ = ["counts", "endpoint", "errors", "explanation", "layout", "page", "sizes", "wire"]
