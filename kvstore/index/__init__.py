"""Which engine or node has which prefix, and the followers that feed it."""
