"""Noticing processes and what they map.

    /proc scan ───┐
    KernelEvents ─┴─ Watcher: which processes to look at ──► ProcessMaps ──► ObjectStore ──► Registry.update / gone
    (connector, perf MMAP2)                                  /proc/PID/maps

Maps are the truth, and events only say when to look: a lost event costs a rescan, never a missed object. Only of a
process that ended before anybody looked are its events believed, each file's identity checked.
"""
