"""Runs inside gdb: prints what gdb reads at every probe of the program's notes, without running from one to the next.

    gdb -batch -x gdb_values.py --args PROGRAM    with the program's input as standard input

Each line has a probe's address and its arguments, as hexadecimal numbers without a sign, or what gdb says instead.
"""

from __future__ import annotations

import os

import gdb  # type: ignore[import-untyped] # exists inside gdb alone

MOST_BITS = 64


def value(index: int) -> str:
    try:
        return hex(int(gdb.parse_and_eval(f"(long long)$_probe_arg{index}")) % (1 << MOST_BITS))
    except gdb.error as error:
        return str(error).replace(" ", "_")


gdb.execute("set confirm off")
gdb.execute("break *probes")
gdb.execute("run", to_string=True)
start, count = (int(gdb.parse_and_eval(symbol)) for symbol in ("(long)&probes", "(long)&probe_count"))
with open(os.environ["GDB_VALUES"], "w") as told:
    for address in range(start, start + count):
        # every register stays as it is, so that all probes see the same values
        gdb.execute(f"set $pc = {address}")
        arguments = int(gdb.parse_and_eval("$_probe_argc"))
        told.write(" ".join([hex(address), *map(value, range(arguments))]) + "\n")
gdb.execute("kill")
