"""Threads and their mailboxes, health, the service manager, logs: what any daemon has."""
