"""The commands: `stapsdt`, the client, with one module for each of its commands, and `stapsdtd`, the daemon."""
