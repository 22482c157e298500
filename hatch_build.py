"""Compiles the BPF objects when a wheel or an editable install is made, and tags the wheel for its machine."""

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
        if runpy.run_path(str(ROOT / "bpf" / "build.py"))["build_all"]():
            # no code of the machine's own, which would depend on the C library: musl or glibc, either will do
            build_data["tag"] = f"py3-none-linux_{platform.machine()}"
