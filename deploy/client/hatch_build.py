"""Generates the protobuf code and the blocking client, and gives the client's wheel the files that the daemon's lacks.

The daemon's pyproject.toml has the one list of them, under `exclude`, so that no file is in both wheels or in neither.
"""

from __future__ import annotations

import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from pathspec import GitIgnoreSpec

TREE = Path(__file__).resolve().parents[2]
PROTOS = "stapsdtd/v1/*.proto"


class ClientHook(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name == "sdist":
            raise NotImplementedError("stapsdtd-client has no sdist: that of stapsdtd is the source of both")
        runpy.run_path(str(TREE / "proto" / "generate.py"))["generate"]()
        if version == "standard":
            build_data["force_include"].update({str(TREE / name): name for name in files()})
            protos = (TREE / "proto").glob(PROTOS)
            build_data["force_include"].update({str(path): str(path.relative_to(TREE / "proto")) for path in protos})


def files() -> Iterator[str]:
    project = tomllib.loads((TREE / "pyproject.toml").read_text())
    left_out = GitIgnoreSpec.from_lines(project["tool"]["hatch"]["build"]["targets"]["wheel"]["exclude"])
    for path in sorted((TREE / "stapsdtd").rglob("*")):
        name = path.relative_to(TREE).as_posix()
        if path.is_file() and "__pycache__" not in path.parts and left_out.match_file(name):
            yield name
