"""Adapters to the kernel, without policy: each file is one interface (procfs, tracefs, perf, the process connector).

They turn OSError into this package's errors where a user can do something about it; what is normal in a race with a
dying process (ENOENT, ESRCH) comes back as an empty answer.
"""
