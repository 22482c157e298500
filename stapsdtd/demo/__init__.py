"""`./dev demo`: runs a daemon, a traced program and a client on this host."""
