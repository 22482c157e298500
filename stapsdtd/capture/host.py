"""What this host offers to capture events with, and the engine that fits it."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from stapsdtd.capture.bpf.engine import BpfEngine
from stapsdtd.capture.bpf.groups import Attachments
from stapsdtd.capture.bpf.kernel import Loaded, feature, load
from stapsdtd.capture.bpf.paging import Paging
from stapsdtd.capture.engine import Engine
from stapsdtd.capture.ftrace.decode import PidsOf
from stapsdtd.capture.ftrace.engine import FtraceEngine
from stapsdtd.capture.names import Owner
from stapsdtd.config import Config
from stapsdtd.errors import KernelFeatureError
from stapsdtd.functions.kernel import ways_to_attach
from stapsdtd.kernel.features import Feature, probe_features
from stapsdtd.kernel.filesystems import Filesystems
from stapsdtd.kernel.function_hooks import HookTrials
from stapsdtd.kernel.nops import NopRewriting, nop_feature, probe_nops
from stapsdtd.kernel.process_memory import LocalMemory, touch
from stapsdtd.kernel.tracefs import Tracefs
from stapsdtd.procs.budgets import user_of
from stapsdtd.procs.descendants import Descendants
from stapsdtd.runtime.shares import Toll

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Host:
    """features: what probes in programs need. hooks: tell what kernel functions need.

    bpf: the loaded program, or why there is none.
    """

    tracefs: Tracefs
    features: tuple[Feature, ...]
    hooks: HookTrials
    nops: NopRewriting
    bpf: Loaded | KernelFeatureError

    @classmethod
    def probe(cls) -> Host:
        """Find out what this host supports, which takes some 200 ms. Raises KernelFeatureError without tracefs."""
        hooks = HookTrials()
        with ThreadPoolExecutor(1, "stapsdtd-nops") as executor:
            # the trial mostly waits
            trial = executor.submit(probe_nops, Owner.this_process().group)
            bpf = load()
            features = probe_features()
            nops = trial.result()
        return cls(Tracefs.locate(), (*features, nop_feature(nops), feature(bpf)), hooks, nops, bpf)

    def make_engine(self, config: Config, pids_of: PidsOf, descendants: Descendants, toll: Toll) -> Engine:
        """Make the configured engine, or choose one. Raises KernelFeatureError if the configured one cannot work here.

        pids_of: tells the ftrace engine which process a thread belongs to. descendants: follows processes for it.
        toll: what clients pay for the reading of their events.
        """
        owner, buffer_bytes = Owner.this_process(), config.limits.max_total_kernel_buffer_mib << 20
        if isinstance(self.bpf, Loaded):
            if config.engine != "ftrace":
                memory = LocalMemory(Filesystems(config.filesystems.arm))
                paging = Paging(touch, user_of, memory.local_bytes)
                attachments = Attachments.of(self.bpf, self.tracefs, partial(ways_to_attach, self.hooks))
                return BpfEngine(
                    self.tracefs, owner, self.bpf, paging, buffer_bytes, toll=toll, attachments=attachments
                )
            self.bpf.close()
        elif config.engine == "bpf":
            raise self.bpf
        elif config.engine == "auto":
            _log.warning("%s; the ftrace engine is used instead", self.bpf)
        return FtraceEngine(self.tracefs, owner, pids_of, descendants, buffer_bytes)
