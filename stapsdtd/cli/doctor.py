"""`stapsdt doctor`: what this host lacks, and the command that mends it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from stapsdtd.cli import options
from stapsdtd.cli.render import is_colourful, paint
from stapsdtd.client import Client, ClientError
from stapsdtd.runtime.text import escape

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stapsdtd import client
    from stapsdtd.kernel import features

_PATIENCE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that stapsdtd wants; without a required one it cannot work at all."""

    name: str
    available: bool
    required: bool
    detail: str
    remedy: str


@click.command("doctor")
@options.as_json
@click.pass_obj
def command(server: options.Server, *, as_json: bool) -> int:
    """Check what stapsdtd needs of this host, and name the command that mends what is missing.

    The exit code is 1 if something is missing that stapsdtd cannot do without. If the server answers, its own
    findings count: it may see more than the user who asks.
    """
    answer = _ask(server)
    checks = [_server_check(server.address, answer), *merge(_local(), _reported(answer))]
    for check in checks:
        print(json.dumps(asdict(check)) if as_json else _show(check))
    return 1 if any(check.required and not check.available for check in checks) else 0


def _local() -> list[features.Feature]:
    # imported, and the kernel asked, only when called
    from stapsdtd.capture.bpf.kernel import feature, load  # noqa: PLC0415
    from stapsdtd.kernel.features import probe_features  # noqa: PLC0415
    from stapsdtd.kernel.nops import nop_feature, probe_nops  # noqa: PLC0415

    return [*probe_features(), nop_feature(probe_nops()), feature(load())]


def merge(local: Iterable[features.Feature], reported: Iterable[client.Feature]) -> list[Check]:
    """What was found here, overruled by what the server found."""
    checks = {each.name: Check(each.name, each.available, each.required, each.detail, each.remedy) for each in local}
    for each in reported:
        checks[each.name] = Check(each.name, each.available, each.required, each.detail, each.remedy)
    return list(checks.values())


def _ask(server: options.Server) -> client.ServerInfo | ClientError:
    try:
        with Client(server.address, tls=server.tls, timeout_seconds=_PATIENCE_SECONDS) as connection:
            return connection.info()
    except ClientError as error:
        return error


def _reported(answer: client.ServerInfo | ClientError) -> tuple[client.Feature, ...]:
    return () if isinstance(answer, ClientError) else answer.features


def _server_check(server: str, answer: client.ServerInfo | ClientError) -> Check:
    if isinstance(answer, ClientError):
        # the last part of a client's error is what to do
        what, colon, remedy = str(answer).rpartition(": ")
        return Check("server", False, False, what, remedy) if colon else Check("server", False, False, remedy, "")
    detail = f"version {answer.version} answers on {server}, engine {answer.engine}"
    return Check("server", available=True, required=False, detail=detail, remedy="")


def _show(check: Check) -> str:
    if check.available:
        verdict, colour = "ok", "green"
    else:
        verdict, colour = ("MISSING", "red") if check.required else ("missing", "yellow")
    painted = paint(f"{verdict:<8}", colour, colourful=is_colourful(sys.stdout))
    line = f"{painted} {escape(check.name)}: {escape(check.detail)}"
    return line if check.available or not check.remedy else f"{line}\n         {escape(check.remedy)}"
