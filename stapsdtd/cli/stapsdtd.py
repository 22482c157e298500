"""The daemon's command line: `stapsdtd --listen unix:PATH`."""

from __future__ import annotations

import asyncio
import dataclasses
import sys

import click

from stapsdtd import __version__, config
from stapsdtd.addresses import DEFAULT_ADDRESS
from stapsdtd.config.file import load
from stapsdtd.errors import StapsdtdError
from stapsdtd.runtime import logs
from stapsdtd.runtime.text import escape

_LEVELS = ("debug", "info", "warning", "error")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="stapsdtd %(version)s")
@click.option("--listen", metavar="unix:PATH", help=f"Address to listen on.  [default: {DEFAULT_ADDRESS}]")
@click.option(
    "--config", "config_path", metavar="FILE", help="Configuration file (TOML). Options override its settings."
)
@click.option("--engine", type=click.Choice(config.ENGINES), help="How to capture events.  [default: auto]")
@click.option("--no-inventory", is_flag=True, help="Do not look for installed files with probes.")
@click.option("--cleanup", is_flag=True, help="Remove what a killed daemon left in the kernel, then exit.")
@click.option(
    "--log-level", type=click.Choice(_LEVELS), default="info", show_default=True, help="The least severe level to log."
)
def command(
    listen: str | None,
    config_path: str | None,
    engine: str | None,
    *,
    no_inventory: bool,
    cleanup: bool,
    log_level: str,
) -> None:
    """Trace static (SDT) probes in all processes, and serve their events over gRPC until SIGTERM."""
    logs.set_up(log_level)
    if cleanup:
        _clean_up()
        return
    # not needed for --help and --cleanup
    from stapsdtd.daemon import serve  # noqa: PLC0415
    from stapsdtd.runtime.slices import MeasuredLoop  # noqa: PLC0415

    def load_config() -> config.Config:
        loaded = load(config_path) if config_path else config.Config()
        if listen is not None:
            loaded = dataclasses.replace(loaded, listeners=(config.Listener(listen),))
        if engine is not None:
            loaded = dataclasses.replace(loaded, engine=engine)
        if no_inventory:
            loaded = dataclasses.replace(loaded, inventory=dataclasses.replace(loaded.inventory, enabled=False))
        return config.validated(loaded)

    with asyncio.Runner(loop_factory=MeasuredLoop) as runner:
        runner.run(serve(load_config))


def _clean_up() -> None:
    from stapsdtd.capture.cleanup import clean_up  # noqa: PLC0415
    from stapsdtd.kernel.tracefs import Tracefs  # noqa: PLC0415

    cleaned = clean_up(Tracefs.locate())
    print(f"removed {cleaned.events} events and {cleaned.instances} instances")
    if cleaned.failures:
        raise StapsdtdError("; ".join(cleaned.failures))


def main() -> None:
    """Exit with 0 for success, 1 for failure, 2 for wrong usage. A failure is one line on standard error."""
    try:
        command(standalone_mode=False)
    except click.exceptions.Exit as exit_:
        sys.exit(exit_.exit_code)
    except click.ClickException as error:
        print(f"stapsdtd: {escape(error.format_message())}; see 'stapsdtd --help'", file=sys.stderr)
        sys.exit(2)
    except (StapsdtdError, OSError) as error:
        print(f"stapsdtd: {escape(str(error))}", file=sys.stderr)
        sys.exit(1)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
