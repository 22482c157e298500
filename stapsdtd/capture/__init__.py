"""The capture engines, which arm sites and read their events, behind one Protocol (`engine.Engine`).

    arm(Target) ──► tracefs ──► uprobes ──► ring buffer ──► reader thread ──► decode ──► Sink.deliver(EventBatch)

A crash leaves events and instances in tracefs, named after the daemon that made them (`names`). The next start, or
`stapsdtd --cleanup`, removes them.
"""
