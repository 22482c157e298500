"""Generate stapsdtd/v1 (messages, stubs and their types) from proto/stapsdtd/v1/*.proto, and the blocking client from
the asyncio one.

Runs as `python proto/generate.py`, and through hatch_build.py when a wheel or an editable install is made.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent

_CLIENT = ROOT / "stapsdtd" / "client"
_BLOCKING = (
    (r'\A""".*?"""', '"""The blocking client. Generated from aio.py by proto/generate.py."""'),
    (r"\basync (def|for|with) ", r"\1 "),
    (r"\bawait ", ""),
    (r"\bAsync|(?<=Service)Async", ""),
    (r"\b__a(enter|exit)__", r"__\1__"),
    (r"\baclosing\b", "closing"),
    (r"\basyncio\b", "time"),
    (r"import grpc\.aio\n", ""),
    (r"\bclient\.streaming\b", "client.blocking_streaming"),
    (r"from stapsdtd\.client\.entering import \w+\n| *@entering\n", ""),
    (r"\bgrpc\.aio\.UnaryStreamCall\[pb\.StreamRequest, ", "grpc._CallIterator["),
    (r"\bgrpc\.aio\b", "grpc"),
    (r"\bAn async context", "A context"),
)


def generate() -> None:
    _generate_protobuf()
    source = (_CLIENT / "aio.py").read_text()
    (_CLIENT / "sync.py").write_text(blocking(source))


def _generate_protobuf() -> None:
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


def blocking(source: str) -> str:
    """Return the source of an asyncio module as one that blocks."""
    for pattern, replacement in _BLOCKING:
        source = re.sub(pattern, replacement, source, flags=re.DOTALL)
    left = re.search(r".*\b(a?sync|await|aio)\b(?!\.py).*", source, re.IGNORECASE)
    if left:
        sys.exit(f"proto/generate.py does not know how this line blocks: {left[0].strip()}")
    return source


if __name__ == "__main__":
    generate()
