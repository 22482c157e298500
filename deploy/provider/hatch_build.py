"""Gives the wheel the files that pyproject.toml names, which are outside this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

TREE = Path(__file__).resolve().parents[2]


class ProviderHook(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name == "sdist":
            raise NotImplementedError("stapsdtd-provider has no sdist: that of stapsdtd is the source of all")
        # an editable install finds them in the tree
        if version == "standard":
            build_data["force_include"].update({str(TREE / name): name for name in self.config["files"]})
