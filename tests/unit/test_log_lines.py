"""Lines of the log are limited by the user whom they concern: every call says whom, or stands here with the reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import stapsdtd

_PACKAGE = Path(stapsdtd.__file__).parent
_CLIENTS = {"cli", "client", "demo", "provider", "v1"}
_APART = {"procs/copying.py"}
"""A process of its own, whose standard error the daemon reads."""
_LEVELS = {"info", "warning", "error", "exception", "critical", "log"}
"""Level debug is not limited."""

_SHARED = {
    "once, as the daemon starts, stops or is reloaded by root, and where the host lacks something": [
        ("capture/cleanup.py", "cannot remove what a killed daemon left: %s"),
        ("capture/cleanup.py", "removed %d events and %d instances that a killed daemon left"),
        (
            "capture/ftrace/engine.py",
            "cannot count hits, so events too large for the ring are not reported as lost: %s",
        ),
        ("capture/host.py", "%s; the ftrace engine is used instead"),
        ("daemon.py", "%s"),
        ("daemon.py", "metrics are on %s"),
        ("daemon.py", "reloaded: ended %d subscriptions that are not allowed any more"),
        ("daemon.py", "settings other than roles have changed: restart the daemon to apply them"),
        ("daemon.py", "stapsdtd %d starts"),
        ("daemon.py", "the configuration cannot be reloaded, and stays as it was: %s"),
        ("daemon.py", "these roles can trace nothing here: %s; %s"),
        ("daemon.py", "unavailable on this host: %s; run 'stapsdt doctor' to see why"),
        ("kernel/nop_trial.py", "process %d, the nop trial, is stuck in the kernel and was left behind"),
        ("procs/kernel_events.py", "%s"),
        ("runtime/service_manager.py", "cannot send %s to the service manager at %s: %s"),
        ("runtime/service_manager.py", "stopping watchdog notifications: %s"),
        ("runtime/stopping.py", "cannot free the sockets for the next daemon"),
        ("runtime/stopping.py", "exiting; run 'stapsdtd --cleanup' once the process is gone to remove what is left"),
        ("runtime/stopping.py", "stopping takes more than %g s: %s"),
        ("sandbox/parser.py", "the parser's sandbox lacks what is unavailable on this host: %s"),
        ("sessions/provider_socket.py", "programs cannot wait there for their probes: %s"),
    ],
    "memory, descriptors, a disk or the kernel failed; whoever used them up is not known": [
        ("api/errors.py", "a request failed: %s"),
        ("capture/bpf/draining.py", "cannot wait until hits have left a table, trying again: %s"),
        ("capture/bpf/endings.py", "cannot wait until hits have left an old plan, trying again: %s"),
        ("capture/bpf/moves.py", "hits of sites that moved may be lost, for one of each thread at most: %s"),
        ("capture/bpf/hit_tables.py", "a table of rows stays in the kernel until its place is used again: %s"),
        ("capture/bpf/missed.py", "cannot tell what a program of kernel functions skipped, trying again: %s"),
        ("capture/bpf/missed.py", "cannot tell which calls of kernel functions the kernel missed, trying again: %s"),
        ("capture/bpf/paging.py", "cannot bring in memory that hits did not find: %s"),
        ("capture/bpf/reaper.py", "%s; trying again later, at the latest when the daemon starts next"),
        ("capture/bpf/reconciler.py", "calls in progress may be taken for such that led to others: %s"),
        ("capture/bpf/ring_set.py", "a ring stays at %d bytes instead of %d: %s"),
        ("capture/bpf/ring_set.py", "no spare rings, so that a process that fires too fast can cost others events: %s"),
        ("capture/bpf/span_tables.py", "a table of spans stays in the kernel until its place is used again: %s"),
        ("capture/ftrace/instances.py", "%s; trying again later"),
        ("metrics/exporter.py", "no metrics for now: %s"),
        ("procs/watcher.py", "%s; /proc is read every %g s instead"),
        ("procs/watcher.py", "some changed processes could not be looked at: %s"),
        ("sandbox/processes.py", "the sandbox's process %d does not end, and is left behind"),
        ("sessions/attacher.py", "process %d is no longer traced, since its main thread ended: %s"),
        ("sessions/file_writes.py", "a file that is rewritten in place is noticed some seconds later: %s"),
        ("sessions/provider_socket.py", "no program can wait for its probes for %g s: %s"),
    ],
    "about a buffer or a table that all users share": [
        (
            "capture/bpf/following.py",
            "%s: %d processes are not followed: a scope has room for %d, or the kernel had no memory for them",
        ),
        ("procs/collector.py", "the kernel dropped records of mappings or processes; reading all of /proc"),
        ("procs/descendants.py", "the kernel dropped reports of forks: some processes may not be followed"),
        ("runtime/health.py", "NOT_SERVING: events cannot be captured: %s"),
        ("runtime/health.py", "SERVING: events can be captured again"),
    ],
    "about files that root installed, and the daemon's own": [
        ("inventory/inventory.py", "installed files cannot be looked for: %s"),
        ("inventory/inventory.py", "inventory: %d files with probes, looked at in %.1f s"),
        ("inventory/inventory.py", "the next start reads files once more: %s"),
        ("inventory/inventory.py", "what is installed is noticed by a scan every hour: %s"),
        ("inventory/store.py", "%s %s, and files are read once more"),
        (
            "inventory/store.py",
            "%s is not written: it would have %s bytes, more than %s; the next start reads files once more",
        ),
        ("inventory/store.py", "files are read once more: %s"),
        ("inventory/watches.py", "%s; what is installed in others is noticed with the next scan"),
    ],
    "about the host's clock, which root sets": [
        ("runtime/wall_clock.py", "the clock was set by %+.9g s, and the host suspended for %.9g s"),
    ],
    "about a file that the kernel refuses, whoever wants it": [
        ("capture/bpf/arming.py", "%s: %s stays armed as it was: %s"),
        ("capture/bpf/groups.py", "%s: %s: %s"),
        ("capture/bpf/groups.py", "%s: %s; all processes are patched"),
        ("capture/bpf/groups.py", "%s: cannot patch further processes: %s"),
        ("capture/ftrace/wanted_events.py", "%s: %s"),
        ("capture/ftrace/wanted_events.py", "%s; trying again later"),
    ],
    "a defect of the daemon, whose traceback is written once": [
        ("api/errors.py", "a request failed"),
        ("capture/bpf/counters.py", "%d events of a site were counted by the kernel and never read"),
        ("capture/bpf/draining.py", "the rows of a table could not be read, which is tried again"),
        ("capture/bpf/paging.py", "pid %d: cannot bring in memory at %#x"),
        ("capture/bpf/reader.py", "%d events could not be delivered"),
        ("capture/bpf/reader.py", "%d records could not be decoded"),
        ("capture/bpf/reader.py", "%d records name plans that are not known"),
        ("capture/bpf/reader.py", "memory that hits could not read cannot be paged in"),
        ("capture/bpf/reader.py", "reading events failed"),
        ("capture/bpf/reading.py", "a subscription's counters could not be reported"),
        ("capture/bpf/reading.py", "events could not be delivered"),
        ("capture/bpf/reading.py", "rows could not be delivered"),
        ("capture/bpf/reaper.py", "cannot close a probe's perf event"),
        ("capture/bpf/reaper.py", "cannot disarm an event; the next start of the daemon will remove it"),
        ("capture/bpf/reaper.py", "cannot remove an event; the next start of the daemon will"),
        ("capture/bpf/span_watch.py", "starts that wait for too long could not be looked for, which is tried again"),
        ("capture/ftrace/reader.py", "%d pages of %s could not be read"),
        ("capture/ftrace/reader.py", "%d records of %s could not be decoded"),
        ("capture/ftrace/reader.py", "reading events failed"),
        ("metrics/exporter.py", "cannot collect metrics"),
        ("runtime/health.py", "health check failed; retrying in %g s"),
        ("runtime/logs.py", "%s ended"),
        ("sandbox/queueing.py", "the parser failed"),
        ("sessions/housekeeping.py", "the engine failed in periodic work, which is tried again"),
        ("sessions/scoped_processes.py", "process %d: its end cannot be handled"),
        ("sessions/session.py", "cannot disarm %s"),
        ("sessions/subscriptions.py", "subscription %s did not end cleanly"),
    ],
    "the client is not identified yet": [
        ("api/relay.py", "connection refused on %s: %s"),
    ],
}
"""Lines that share what is written at once of those that concern no user, by reason: module and message."""


def _modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(_PACKAGE.rglob("*.py")):
        name = str(path.relative_to(_PACKAGE))
        if name.split("/", maxsplit=1)[0] not in _CLIENTS and name not in _APART:
            yield name, ast.parse(path.read_text())


def _calls(module: ast.Module) -> Iterator[ast.Call]:
    """Yield what writes a line at level info or above."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LEVELS:
            of = node.func.value
            if isinstance(of, ast.Name) and of.id in {"_log", "_LOG", "log", "logger", "logging"}:
                yield node


def _names(module: ast.Module) -> dict[str, ast.expr]:
    """What is assigned to local names, by which messages and extras are handed on."""
    assigned = (node for node in ast.walk(module) if isinstance(node, ast.Assign))
    return {target.id: each.value for each in assigned for target in each.targets if isinstance(target, ast.Name)}


def _message(call: ast.Call, names: dict[str, ast.expr]) -> str:
    arguments = [names.get(each.id, each) if isinstance(each, ast.Name) else each for each in call.args]
    texts = [each.value for each in arguments if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return texts[0] if texts else ast.unparse(call)


def _concerns_a_user(call: ast.Call, names: dict[str, ast.expr]) -> bool:
    """Whether `extra` is, or begins with, fields(client=...) or fields(uid=...)."""
    extra = next((each.value for each in call.keywords if each.arg == "extra"), None)
    if isinstance(extra, ast.BinOp):
        extra = extra.left
    if isinstance(extra, ast.Name):
        extra = names.get(extra.id)
    is_fields = isinstance(extra, ast.Call) and isinstance(extra.func, ast.Name) and extra.func.id == "fields"
    return is_fields and bool({each.arg for each in extra.keywords} & {"client", "uid"})  # type: ignore[union-attr]


def test_each_line_names_its_user_or_is_known_to_have_none() -> None:
    found = set()
    for name, module in _modules():
        names = _names(module)
        found |= {(name, _message(call, names)) for call in _calls(module) if not _concerns_a_user(call, names)}
    assert found == {line for lines in _SHARED.values() for line in lines}


def test_a_line_without_a_user_is_found() -> None:
    module = ast.parse("extra = fields(role=1)\n_log.info('a', extra=extra)\n_log.info('b', extra=fields(uid=1) | {})")
    calls, names = list(_calls(module)), _names(module)
    assert [(_message(call, names), _concerns_a_user(call, names)) for call in calls] == [("a", False), ("b", True)]


def test_nothing_else_writes_to_standard_error() -> None:
    """Only the handler limits lines and escapes them."""
    found = set()
    for name, module in _modules():
        for node in ast.walk(module):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in {"print", "sys.stderr.write", "logging.StreamHandler", "logging.basicConfig", "warnings.warn"}:
                found.add((name, called))
    assert found == {("runtime/logs.py", "logging.basicConfig")}
