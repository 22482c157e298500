"""stapsdtd: a provider daemon for SystemTap static probes.

    /proc scan ─┐
    cn_proc ────┤ procs ──► sandbox: elf, arch ──► catalog.Registry ──► ListProbes / WatchProbes
    perf MMAP2 ─┘                                     │
         sessions: who wants which probes ──► capture, by plan ──► uprobes in the kernel
                                                      │
    kernel buffers ──► capture: read, decode ──► sessions: bounded logs ──► api: gRPC ──► client, cli

Read `daemon.py` first: it builds the parts and wires them. `model.py` holds the data that flows between them, and
docs/design.md follows three values on their way.
"""

__version__ = "0.1.0"
