"""Capture: the engines that arm sites and read their events, behind one Protocol (`engine.Engine`).

    arm(Target) ──► tracefs ──► uprobes ──► ring buffer ──► reader thread ──► decode ──► Sink.deliver(EventBatch)

What a crash leaves: the ftrace engine's events and instances stay in the kernel until the next start or
`stapsdtd --cleanup`; their names say whose they are (`ftrace.names`).
"""
