"""The Conductor's HTTP side: clients, engines and operators."""

__all__ = [
    "admin", "advising", "auth", "bodies", "bringing", "connections", "guarding", "kept_costs",
    "membership", "metrics", "prompts", "proxy", "sending", "tracing", "upstream", "waiting",
]  # fmt: skip
