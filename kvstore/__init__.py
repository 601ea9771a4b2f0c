"""A hierarchical, verified KV-cache store for LLM inference; ``kvstore.client`` is the way in."""
