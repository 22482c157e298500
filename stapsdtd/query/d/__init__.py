"""D, DTrace's language."""
