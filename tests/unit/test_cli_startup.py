"""What `stapsdt --help` imports: that takes most of its time, and is the same on any machine, as times are not."""

from __future__ import annotations

import json
import subprocess
import sys

_MOST = 40
_PROGRAM = """
import json, sys
import click
before = set(sys.modules)
from stapsdtd.cli.stapsdt import run
run(["--help"])
print(json.dumps(sorted(set(sys.modules) - before)), file=sys.stderr)
"""


def test_help_imports_little_beside_click() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: stapsdt")
    imported = json.loads(done.stderr)
    assert {"stapsdtd.cli.stapsdt"} <= set(imported)
    assert len(imported) <= _MOST
    packages = {name.partition(".")[0] for name in imported}
    assert packages - sys.stdlib_module_names == {"stapsdtd", "click"}
    assert not packages & {"asyncio", "ssl", "socket", "logging"}
