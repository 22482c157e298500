"""`stapsdt doctor`: checks this host, or its runtimes, and suggests fixes."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from stapsdtd.cli import options
from stapsdtd.cli.check import Check
from stapsdtd.cli.render import paint, wants_color
from stapsdtd.cli.runtime_checks import check_runtime
from stapsdtd.cli.runtime_target import asked, check_target
from stapsdtd.cli.runtimes import RUNTIMES
from stapsdtd.client import Client, ClientError, InventoryState
from stapsdtd.runtime.text import escape

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stapsdtd import client
    from stapsdtd.kernel import features

_TIMEOUT_SECONDS = 5.0
_TRIAL_SECONDS = 2.0


_EXAMPLES = """\b
Examples:
  stapsdt doctor
  stapsdt doctor python
  stapsdt doctor java 4711
  stapsdt doctor /opt/python/bin/python3.12
"""


def _complete(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    named = [CompletionItem(name) for name in RUNTIMES if name.startswith(incomplete)]
    return [*named, *options.complete_pid(ctx, parameter, incomplete)]


@click.command("doctor", epilog=_EXAMPLES)
@click.argument("words", metavar="[RUNTIME] [PID|PATH]", nargs=-1, shell_complete=_complete)
@options.as_json
@click.pass_obj
def command(server: options.Server, *, words: tuple[str, ...], as_json: bool) -> int:
    """Check that this host has what stapsdtd needs, and suggest how to fix what is missing.

    With a RUNTIME (python, java, node, php, ruby, mysql), tell which probes those have that $PATH leads to, or that
    run, and why one may have none. With a PID, or the PATH of a program or a library, tell that of this one: which
    probes it has, when they fire, and whether you may trace it.

    The exit code is 1 if something required is missing, or what you ask about has no probes. If the server responds,
    its own findings take precedence, since it may have access to more than you.
    """
    about = asked(words)
    if about.has_target:
        checks = check_target(about, server)
        _print(checks, as_json=as_json)
        return 0 if checks and checks[0].available else 1
    if about.runtime:
        checks = check_runtime(about.runtime, server)
        _print(checks, as_json=as_json)
        return 0 if any(check.available for check in checks) else 1
    response = _query(server)
    checks = [_server_check(server.address, response)]
    local = _local() if find_spec("stapsdtd.daemon") else None
    if local is None:
        problem = "not checked: stapsdtd-client alone is installed here"
        checks.append(Check("this host", False, False, problem, "install stapsdtd to have it checked"))
    checks += merge(local or (), _reported(response))
    checks += inventory_checks(response)
    _print(checks, as_json=as_json)
    return 1 if any(check.required and not check.available for check in checks) else 0


def _print(checks: Iterable[Check], *, as_json: bool) -> None:
    for check in checks:
        print(json.dumps(asdict(check)) if as_json else _format(check))


def _local() -> list[features.Feature]:
    # imported here, so that only this command pays for it
    from stapsdtd.capture.bpf.kernel import feature, load  # noqa: PLC0415
    from stapsdtd.capture.names import Owner  # noqa: PLC0415
    from stapsdtd.kernel.features import probe_features  # noqa: PLC0415
    from stapsdtd.kernel.function_hooks import HookTrials  # noqa: PLC0415
    from stapsdtd.kernel.nops import nop_feature, probe_nops  # noqa: PLC0415

    nops = probe_nops(Owner.this_process().group)
    return [*probe_features(), nop_feature(nops), feature(load()), *HookTrials().features(_TRIAL_SECONDS)]


def merge(local: Iterable[features.Feature], reported: Iterable[client.Feature]) -> list[Check]:
    """Merge the local findings with those that the server reported, which take precedence."""
    checks = {feature.name: _check(feature) for feature in local}
    checks |= {feature.name: _check(feature) for feature in reported}
    return list(checks.values())


def _check(feature: features.Feature | client.Feature) -> Check:
    return Check(feature.name, feature.available, feature.required, feature.detail, feature.remedy)


def _query(server: options.Server) -> client.ServerInfo | ClientError:
    try:
        with Client(server.address, tls=server.tls, timeout_seconds=_TIMEOUT_SECONDS) as connection:
            return connection.info()
    except ClientError as error:
        return error


def _reported(response: client.ServerInfo | ClientError) -> tuple[client.Feature, ...]:
    return () if isinstance(response, ClientError) else response.features


def _server_check(server: str, response: client.ServerInfo | ClientError) -> Check:
    if isinstance(response, ClientError):
        # the last part of a client's error is the remedy
        problem, colon, remedy = str(response).rpartition(": ")
        return Check("server", False, False, problem, remedy) if colon else Check("server", False, False, remedy, "")
    detail = f"version {response.version} on {server}, engine {response.engine}"
    return Check("server", available=True, required=False, detail=detail, remedy="")


def inventory_checks(response: client.ServerInfo | ClientError) -> list[Check]:
    """Return what is wrong with the server's inventory of installed files."""
    inventory = None if isinstance(response, ClientError) else response.inventory
    if inventory is None or inventory.state is not InventoryState.FAILED:
        return []
    remedy = "see the server's log; until the next scan, programs are traced from when they are seen to run"
    return [Check("inventory", False, False, f"installed files cannot be looked for: {inventory.problem}", remedy)]


def _format(check: Check) -> str:
    if check.available:
        verdict, style = "ok", "green"
    else:
        verdict, style = ("MISSING", "red") if check.required else ("missing", "yellow")
    painted = paint(f"{verdict:<8}", style, color=wants_color(sys.stdout))
    line = f"{painted} {escape(check.name)}: {escape(check.detail)}"
    return line if check.available or not check.remedy else f"{line}\n         {escape(check.remedy)}"
