"""The Conductor's HTTP side: clients, engines and operators."""

__all__ = [
    "admin", "advising", "auth", "bodies", "bringing", "connections", "dispatching", "guarding",
    "journaling", "kept_costs", "local_tokenizers", "membership", "metrics", "others", "parts",
    "prompts", "proxy", "tracing", "upstream", "waiting",
]  # fmt: skip
