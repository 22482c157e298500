"""The probes that can be traced (`registry`), and how users name them (`selectors`)."""
