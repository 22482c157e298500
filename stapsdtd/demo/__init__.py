"""`./dev demo`: the main job on this host, with a daemon and a program of its own."""
