"""Compiles the BPF objects and the opener of perf events when a wheel or an editable install is made.

The wheel is tagged for its machine.
"""

from __future__ import annotations

import platform
import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent


class CompileHook(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's signature
        has_objects = runpy.run_path(str(ROOT / "bpf" / "build.py"))["build_all"]()
        opener = runpy.run_path(str(ROOT / "systemd" / "build.py"))
        has_opener = opener["build"]()
        if has_opener:
            build_data["shared_scripts"][str(opener["TARGET"])] = opener["TARGET"].name
        if has_objects or has_opener:
            # no code that depends on the C library: musl or glibc, either will do
            build_data["tag"] = f"py3-none-linux_{platform.machine()}"
