"""Adapters to the kernel, free of policy: one file per interface (procfs, tracefs, perf, the process connector).

They turn an OSError that a user can act on into one of this package's errors. Failures that are normal in a race with
a dying process (ENOENT, ESRCH) yield an empty result.
"""
