"""The pure-tracefs engine: for hosts without BPF.

    plan.actions ──► executor ──► uprobe_events, instances/…/enable
    per_cpu/cpuN/trace_pipe_raw ──► reader ──► pages ──► decode ──► Sink

Each subscription has a tracefs instance, a ring buffer for each CPU, so that what the kernel drops there is that
subscription's loss and nobody else's. Events are shared: two subscriptions with the same wish pay one trap.
"""
