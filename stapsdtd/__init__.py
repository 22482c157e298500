"""stapsdtd: a provider daemon for SystemTap static probes.

    /proc scan ─┐
    cn_proc ────┤ watch ──► elf ──► operands ──► probes.Registry ──► ListProbes / WatchProbes
    perf MMAP2 ─┘                                     │
               subscriptions ──► plan (pure) ──► capture (tracefs) ──► uprobes in the kernel
                                                      │
           kernel buffers ──► capture: read, decode ──► sessions: bounded logs ──► gRPC ──► client, cli

Read `daemon.py` first: it builds the parts and wires them. `model.py` holds the data that flows between them.
"""

__version__ = "0.1.0"
