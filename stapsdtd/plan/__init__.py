"""Planning: pure functions from what is wanted to tracefs events, and from (wanted, installed) to steps.

    SiteCapture… ──events.group_sites──► EventSpec… ──steps.changes──► Define, Enable, Disable, Remove

Nothing here does I/O; `capture.ftrace.executor` carries steps out.
"""
