"""The engine-independent part of adapters: decides what to load and store, and when."""
