"""What users of Debian get from the service that `./dev install` made: `./dev test --installed` boots it for these.

Nothing here imports the daemon: the installed `stapsdt` and stapsdtd.client ask the running one, as users do.
"""
