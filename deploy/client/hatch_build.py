"""Generates the protobuf code and the blocking client, and gives the client's wheel the files that the others lack.

The daemon's pyproject.toml lists what its wheel lacks, under `exclude`, and the provider's what it has, under
`files`. No other list says what belongs to the client, so that no file is in two wheels or in none.
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
            raise NotImplementedError("stapsdtd-client has no sdist: that of stapsdtd is the source of all")
        runpy.run_path(str(TREE / "proto" / "generate.py"))["generate"]()
        if version == "standard":
            build_data["force_include"].update({str(TREE / name): name for name in files()})
            protos = (TREE / "proto").glob(PROTOS)
            build_data["force_include"].update({str(path): str(path.relative_to(TREE / "proto")) for path in protos})


def files() -> Iterator[str]:
    project = tomllib.loads((TREE / "pyproject.toml").read_text())
    left_out = GitIgnoreSpec.from_lines(project["tool"]["hatch"]["build"]["targets"]["wheel"]["exclude"])
    in_provider = _in_provider()
    for path in sorted((TREE / "stapsdtd").rglob("*")):
        name = path.relative_to(TREE).as_posix()
        is_own = left_out.match_file(name) and not name.startswith(in_provider)
        if is_own and path.is_file() and "__pycache__" not in path.parts:
            yield name


def _in_provider() -> tuple[str, ...]:
    project = tomllib.loads((TREE / "deploy" / "provider" / "pyproject.toml").read_text())
    return tuple(project["tool"]["hatch"]["build"]["hooks"]["custom"]["files"])
