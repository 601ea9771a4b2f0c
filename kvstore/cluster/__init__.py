"""Other nodes: who they are, which pages they have, and the sessions in which pages are read."""
