"""What this project measures about itself: ``python -m bench GROUP --json``."""
