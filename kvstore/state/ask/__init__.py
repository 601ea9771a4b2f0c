"""Questions to the state, and walks over it in steps."""
