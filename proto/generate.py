"""Generate stapsdtd/v1 (messages, stubs and their types) from proto/stapsdtd/v1/*.proto.

Runs as `python proto/generate.py`, and through hatch_build.py when a wheel or an editable install is made.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def generate() -> None:
    # protoc looks for its plugins in PATH, which lacks those of a virtual environment that is not activated
    os.environ["PATH"] = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", "")))
    sources = sorted((ROOT / "proto").glob("stapsdtd/v1/*.proto"))
    target = ROOT / "stapsdtd" / "v1"
    target.mkdir(exist_ok=True)
    arguments = [
        "protoc",
        f"--proto_path={ROOT / 'proto'}",
        f"--proto_path={files('grpc_tools') / '_proto'}",
        *(f"--{plugin}_out={ROOT}" for plugin in ("python", "grpc_python", "mypy", "mypy_grpc")),
        *map(str, sources),
    ]
    if protoc.main(arguments) != 0:
        sys.exit("protoc failed on the files in proto/; see its message above")
    (target / "__init__.py").write_text('"""Generated from proto/stapsdtd/v1 by proto/generate.py."""\n')


if __name__ == "__main__":
    generate()
