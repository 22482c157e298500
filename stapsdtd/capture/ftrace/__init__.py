"""The pure-tracefs engine: for hosts without BPF.

    plan.steps ──► executor ──► uprobe_events, instances/…/enable
    per_cpu/cpuN/trace_pipe_raw ──► reader ──► pages ──► decode ──► Sink

Each subscription has a tracefs instance, a ring buffer for each CPU, and events of its own, so that what the kernel
counted and dropped there is that subscription's and nobody else's.
"""
