"""What probes there are (`registry`), and how users name them (`selectors`)."""
