"""Notices processes and the objects that they map.

    /proc scan ───┐
    KernelEvents ─┴─► Collector ──► LookQueue ──► Watcher ──► ProcessMaps ──► ObjectStore ──► Registry.update / gone
    (connector, perf MMAP2)         which, when   in turns    /proc/PID/maps  map_files

Maps are the truth, and events only say when to look: a lost event costs a rescan, never a missed object. Events
themselves are believed only of a process that ended before it was looked at, and each file's identity is checked then.
"""
