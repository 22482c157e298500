"""The attacker's process: `python -m tests.siege.attacker PROCESSOR TARGET FOLDER RAIDING SHARED PROVIDER`.

It says `ready`. Each line of standard input is an order in JSON, attacks and for how many seconds; each attack is
carried out in a process of its own, which tells in a line of JSON what was done and what was refused. The limits are
those of a user of a well-kept host, so that what is taken down, if anything, is the daemon and not the machine.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.siege import answers, catalogue, costly, crowds, frames, hits, processes, sessions
from tests.siege.arena import Arena, Ground

ATTACKS: Mapping[str, Callable[[Arena], None]] = {
    **costly.ATTACKS,
    **catalogue.ATTACKS,
    **frames.ATTACKS,
    **hits.ATTACKS,
    **sessions.ATTACKS,
    **processes.ATTACKS,
    **crowds.ATTACKS,
    **answers.ATTACKS,
}

_LIMITS = {
    resource.RLIMIT_AS: 6 << 30,
    resource.RLIMIT_FSIZE: 256 << 20,
    resource.RLIMIT_NOFILE: 2048,
    resource.RLIMIT_NPROC: 1024,
    resource.RLIMIT_CORE: 0,
}


def _attack(name: str, ground: Ground, seconds: float) -> None:
    ground.folder.mkdir()
    arena = Arena(ground, seconds)
    try:
        ATTACKS[name](arena)
    finally:
        arena.close()
        shutil.rmtree(ground.folder)
    told = {"name": name, "done": arena.done, "refusals": arena.refusals, "examples": arena.examples}
    # in one piece, since others tell theirs
    os.write(sys.stdout.fileno(), f"{json.dumps(told)}\n".encode())


def _begin(name: str, ground: Ground, seconds: float) -> None:
    """Nothing of gRPC has run in this process, so that a fork is safe."""
    if os.fork():
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        _attack(name, ground, seconds)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        # what is left of threads and channels concerns nobody
        sys.stderr.flush()
        os._exit(0)


def main() -> None:
    processor, target, *paths, provider = sys.argv[1:]
    folder, raiding, crowding, shared = map(Path, paths)
    os.sched_setaffinity(0, {int(processor)})
    for limit, most in _LIMITS.items():
        resource.setrlimit(limit, (most, most))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        for name in order["attacks"]:
            _begin(name, Ground(target, folder / name, raiding, crowding, shared, provider), order["seconds"])


if __name__ == "__main__":
    main()
