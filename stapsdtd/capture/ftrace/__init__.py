"""The engine for hosts without BPF, on tracefs alone.

    plan.steps ──► executor ──► uprobe_events, instances/…/enable
    per_cpu/cpuN/trace_pipe_raw ──► reader ──► pages ──► decode ──► Sink

Each subscription has its own tracefs instance, with a ring buffer for each CPU, and its own events, so that what the
kernel counts and drops there concerns that subscription alone.
"""
