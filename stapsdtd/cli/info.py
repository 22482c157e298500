"""`stapsdt info`: shows the server's version, kernel features, limits and subscriptions, and the user's rights."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING

import click

from stapsdtd.cli import options
from stapsdtd.cli.render import console, plural
from stapsdtd.cli.unmatched import added_late
from stapsdtd.client import Client, InventoryState
from stapsdtd.runtime.text import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from stapsdtd.client import Access, Account, Arming, Inventory, ServerInfo, SubscriptionInfo


_LATE_SECONDS = 1.0
_MINUTE, _HOUR = 60, 3600


@click.command("info")
@options.as_json
@click.pass_obj
def command(server: options.Server, *, as_json: bool) -> None:
    """Show the server's version, engine, kernel features, limits and subscriptions, and your rights."""
    with Client(server.address, tls=server.tls) as client:
        info, subscriptions = client.info(), client.subscriptions()
    if as_json:
        inventory = {} if info.inventory is None else {"inventory": _inventory_record(info.inventory)}
        print(json.dumps(asdict(info) | inventory | {"subscriptions": [asdict(each) for each in subscriptions]}))
    else:
        _print_info(server.address, info, subscriptions)


def _print_info(server: str, info: ServerInfo, subscriptions: tuple[SubscriptionInfo, ...]) -> None:
    limits = info.limits
    _print_table(
        ("SERVER", ""),
        (
            ("address", server),
            ("version", f"{info.version}, pid {info.pid}"),
            ("engine", info.engine),
            ("kernel", f"{info.kernel_release} {info.machine}"),
            ("probes", f"{info.probes} in {info.objects} objects of {info.processes} processes"),
            *_inventory(info.inventory),
            ("arming", _arming(info.arming)),
            *_access(info.access),
            ("longest lease", f"{limits.max_lease_seconds} s"),
            ("largest queue", f"{limits.max_queue_bytes} bytes"),
            ("largest kernel buffer", f"{limits.max_kernel_buffer_kib} KiB per CPU"),
            ("most selectors", str(limits.max_selectors)),
            ("longest string", f"{limits.max_string_bytes} bytes"),
        ),
    )
    print()
    _print_table(
        ("FEATURE", "AVAILABLE", "DETAIL"),
        (
            (
                feature.name,
                "yes" if feature.available else "no",
                feature.detail if feature.available else _missing(feature.detail, feature.remedy),
            )
            for feature in info.features
        ),
    )
    print()
    if not subscriptions:
        print("no subscriptions")
        return
    _print_table(
        (
            "SUBSCRIPTION",
            "SELECTORS",
            "ONLY",
            "SINCE",
            "STREAM",
            "SITES",
            "FIRED",
            "DELIVERED",
            "AGGREGATED",
            "FILTERED",
            "LOST",
        ),
        chain.from_iterable(map(_rows, subscriptions)),
    )
    for subscription in subscriptions:
        for reason, sites in subscription.added_late.items():
            print(escape(f"{subscription.id}: {added_late(reason, sites)}"))


def _rows(subscription: SubscriptionInfo) -> Iterator[tuple[str, ...]]:
    """Yield a row for a subscription, and one for each of its clauses if it has several."""
    yield (
        subscription.id,
        " ".join(subscription.selectors),
        _only(subscription),
        time.strftime("%H:%M:%S", time.localtime(subscription.created_ns // 1_000_000_000)),
        "open" if subscription.streaming else f"none, {subscription.lease_left_ms / 1000:.0f} s left",
        *_counts(subscription.account),
    )
    for clause in subscription.clauses if len(subscription.clauses) > 1 else ():
        where = f"where {clause.where}" if clause.where else ""
        yield f"  {clause.tag}", " ".join(clause.selectors), where, "", "", *_counts(clause.account)


def _counts(account: Account) -> tuple[str, ...]:
    counts = account.sites, account.fired, account.delivered, account.aggregated, account.filtered, account.lost
    return tuple(map(str, counts))


def _inventory_record(inventory: Inventory) -> dict[str, object]:
    return asdict(inventory) | {"state": inventory.state.value}


def _inventory(inventory: Inventory | None) -> tuple[tuple[str, str], ...]:
    if inventory is None or inventory.state is InventoryState.OFF:
        return (("inventory", "off"),) if inventory else ()
    age = time.time() - inventory.scanned_ns / 1_000_000_000
    parts = [f"{plural(inventory.probes, 'probe')} in {plural(inventory.files, 'installed file')}"]
    if inventory.scanned_ns:
        parts.append(f"scanned {_duration(age)} ago")
    if inventory.state is InventoryState.SCANNING:
        parts.append("scan under way" if inventory.scanned_ns else "first scan under way")
    if inventory.state is InventoryState.FAILED:
        parts.append("the last scan failed")
    return (("inventory", ", ".join(parts) + (f": {inventory.problem}" if inventory.problem else "")),)


def _duration(seconds: float) -> str:
    if seconds < _MINUTE:
        return f"{seconds:.0f} s"
    return f"{seconds / _MINUTE:.0f} min" if seconds < 2 * _HOUR else f"{seconds / _HOUR:.0f} h"


def _arming(arming: Arming) -> str:
    if not arming.waiting and arming.seconds < _LATE_SECONDS:
        return "nothing waits"
    running = f"{arming.running or 'the kernel'} for {arming.seconds:.1f} s, " if arming.seconds else ""
    return f"{running}{arming.waiting} waiting"


def _access(access: Access | None) -> tuple[tuple[str, str], ...]:
    if access is None:
        return ()
    manages = ", manages all subscriptions" if access.manage else ""
    return (
        ("your role", f"{access.role}, as {access.client}{manages}"),
        ("you may list", _processes_of(access.list)),
        ("you may trace", _traced(access)),
    )


def _traced(access: Access) -> str:
    functions = " and kernel functions" if access.functions else ""
    return _processes_of(access.trace) + functions + (access.trace_restriction and f": {access.trace_restriction}")


def _processes_of(uids: tuple[int, ...] | None) -> str:
    if uids is None:
        return "all processes"
    return f"processes of uid {', '.join(map(str, uids))}" if uids else "nothing"


def _only(subscription: SubscriptionInfo) -> str:
    """Format the scope and the expression, `pid 4711, uid 0, where arg0 > 5`; empty if nothing is filtered."""
    scope = subscription.scope
    kinds: dict[str, Iterable[object]] = {
        "pid": scope.pids, "uid": scope.uids, "execname": scope.execnames, "cgroup": scope.cgroups,
        "container": scope.containers,
    }  # fmt: skip
    parts = [f"{kind} {'|'.join(map(str, values))}" for kind, values in kinds.items() if values]
    if scope.follow:
        parts.append("children too")
    if scope.include_clients:
        parts.append("clients too")
    if subscription.where:
        parts.append(f"where {subscription.where}")
    return ", ".join(parts)


def _missing(detail: str, remedy: str) -> str:
    return f"{detail}: {remedy}" if remedy else detail


def _print_table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    from rich.table import Table  # noqa: PLC0415 (not needed for JSON)
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*(Text(escape(cell)) for cell in row))
    console().print(table)
