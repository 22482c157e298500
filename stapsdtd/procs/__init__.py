"""Noticing processes and what they map.

    /proc scan ─┐
    connector  ─┤ Watcher: which processes to look at ──► /proc/PID/maps ──► ObjectStore ──► Registry.update / gone
    perf MMAP2 ─┘

Maps are the truth, and events only say when to look: a lost event costs a rescan, never a missed object. Only of a
process that ended before anybody looked are its events believed, each file's identity checked.
"""
