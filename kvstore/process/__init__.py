"""What any of our programs has: a log, listeners, files of its own, and its machine."""
