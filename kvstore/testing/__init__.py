"""Tools to test a store, for users and our own tests: contracts, simulations, fault injection."""

__all__: list[str] = []
