"""Capture: the engines that arm sites and read their events, behind one Protocol (`engine.Engine`).

    arm(Target) ──► tracefs ──► uprobes ──► ring buffer ──► reader thread ──► decode ──► Sink.deliver(EventBatch)

What a crash leaves behind, events and instances in tracefs, is removed by the next start or by `stapsdtd --cleanup`;
their names tell whose they are (`names`).
"""
