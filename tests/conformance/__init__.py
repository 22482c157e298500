"""D programs with what they print."""
