"""The command lines of `stapsdt`, the client, with a module for each of its commands, and `stapsdtd`, the daemon."""
