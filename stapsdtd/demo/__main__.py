"""Start a daemon, subscribe to probes, run a program that fires them, and check the account.

Exits with 1 if an event is missing or something is left in the kernel.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stapsdtd.client import Account, Client, ClientError
from stapsdtd.errors import StapsdtdError
from stapsdtd.kernel.tracefs import Tracefs

_COMMANDS = Path(sys.executable).parent
_SELECTORS = ("shop:request(arg0:str, arg1, arg2)", "shop_cache:lookup(arg0:str, arg1)")
_REQUESTS = 40
_TIMEOUT_SECONDS = 20.0


def main() -> int:
    tracefs = Tracefs.locate()
    with tempfile.TemporaryDirectory(prefix="stapsdtd-demo-") as folder:
        server = f"unix:{folder}/daemon.sock"
        _say("a daemon, on a socket of its own", f"stapsdtd --listen {server}")
        with _daemon(server) as daemon, Client(server) as client:
            _say(
                "a subscription to the probes of a program that is not running yet",
                f"stapsdt --server {server} trace " + " ".join(f"'{selector}'" for selector in _SELECTORS),
            )
            trace = subprocess.Popen([_COMMANDS / "stapsdt", "--server", server, "trace", *_SELECTORS])
            _wait(client.subscriptions, trace, "the subscription")
            _say("that program: pure Python, which creates its probes at run time", "python -m stapsdtd.demo.shop")
            fired = _run_shop()
            account = _account(client, fired)
            trace.send_signal(signal.SIGINT)
            trace.wait()
            daemon.terminate()
            daemon.wait()
            left = [name for name in _names(tracefs) if f"_{daemon.pid}_" in name]
    _say("the account")
    print(f"    the program fired     {fired:5}")
    print(f"    delivered             {account.delivered:5}")
    print(f"    filtered              {account.filtered:5}")
    print(f"    lost                  {account.lost:5}")
    print(f"    left in the kernel    {len(left):5}")
    agrees = 0 < fired == account.fired == account.delivered + account.filtered + account.lost and not left
    print("\nfired = delivered + filtered + lost, and nothing is left" if agrees else "\nTHE ACCOUNT DOES NOT ADD UP")
    return 0 if agrees else 1


def _say(heading: str, command: str = "") -> None:
    print(f"\n== {heading}" + (f"\n   $ {command}" if command else ""), flush=True)


@contextmanager
def _daemon(server: str) -> Iterator[subprocess.Popen[bytes]]:
    # which would leave a file on the host
    options = ("--no-inventory", "--log-level", "warning")
    daemon = subprocess.Popen([_COMMANDS / "stapsdtd", "--listen", server, *options])
    try:
        with Client(server) as client:
            _wait(lambda: _is_serving(client), daemon, "the daemon")
        yield daemon
    finally:
        with suppress(ProcessLookupError):
            daemon.terminate()
        daemon.wait()


def _is_serving(client: Client) -> bool:
    try:
        return bool(client.info().version)
    except ClientError:
        return False


def _wait(condition: Callable[[], object], process: subprocess.Popen[bytes], name: str) -> None:
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise StapsdtdError(f"{name} did not start; see its output above")
        time.sleep(0.02)


def _run_shop() -> int:
    command = [sys.executable, "-m", "stapsdtd.demo.shop", str(_REQUESTS)]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def _account(client: Client, fired: int) -> Account:
    """Return the subscription's account once it covers all fired events, or after a timeout."""
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while True:
        account = client.subscriptions()[0].account
        if account.delivered + account.filtered + account.lost >= fired or time.monotonic() > deadline:
            return account
        time.sleep(0.02)


def _names(tracefs: Tracefs) -> list[str]:
    return [group for group, _ in tracefs.uprobe_events()] + tracefs.instances()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (StapsdtdError, ClientError) as error:
        sys.exit(f"demo: {error}")
