"""Planning: pure functions from what is wanted to tracefs events, and from (wanted, installed) to actions.

    SiteCapture… ──events.group_sites──► EventSpec… ──actions.changes──► Define, Enable, Disable, Remove

Nothing here does I/O; `capture.ftrace.executor` carries actions out.
"""
