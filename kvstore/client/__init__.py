"""What engines hold of a store: spaces, reads and writes, over a link to a node or embedded."""
