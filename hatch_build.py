"""Generates the protobuf code, the blocking client and the BPF object when a wheel or an editable install is made."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent


class GenerateHook(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's signature
        runpy.run_path(str(ROOT / "proto" / "generate.py"))["generate"]()
        runpy.run_path(str(ROOT / "bpf" / "build.py"))["build"]()
