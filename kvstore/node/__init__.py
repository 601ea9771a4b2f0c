"""One node: what it decides, message by message, and where that is carried out."""
