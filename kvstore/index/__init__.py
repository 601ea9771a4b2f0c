"""The prefix index (which engine or node has which pages), and the followers that update it."""
