"""The daemon's command: `stapsdtd --listen unix:PATH`."""

from __future__ import annotations

import asyncio
import dataclasses
import sys

import click

from stapsdtd import __version__, config
from stapsdtd.errors import StapsdtdError
from stapsdtd.runtime import logs

_LEVELS = ("debug", "info", "warning", "error")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="stapsdtd %(version)s")
@click.option("--listen", metavar="unix:PATH", help=f"Where clients find it.  [default: {config.DEFAULT_LISTEN}]")
@click.option("--config", "config_path", metavar="FILE", help="Settings in TOML; options given here go before them.")
@click.option("--engine", type=click.Choice(config.ENGINES), help="How probes are captured.  [default: auto]")
@click.option("--cleanup", is_flag=True, help="Remove what a killed daemon left in the kernel, and exit.")
@click.option("--log-level", type=click.Choice(_LEVELS), default="info", show_default=True)
def command(listen: str | None, config_path: str | None, engine: str | None, cleanup: bool, log_level: str) -> None:
    """Find the static probes of all processes, and serve their events over gRPC until SIGTERM."""
    logs.set_up(log_level)
    if cleanup:
        _clean_up()
        return
    from stapsdtd.daemon import serve  # noqa: PLC0415 - --help and --cleanup need none of it

    def configured() -> config.Config:
        found = config.load(config_path) if config_path else config.Config()
        if listen is not None:
            found = dataclasses.replace(found, listeners=(config.Listener(listen),))
        if engine is not None:
            found = dataclasses.replace(found, engine=engine)
        return config.validated(found)

    asyncio.run(serve(configured))


def _clean_up() -> None:
    from stapsdtd.capture.cleanup import clean_up  # noqa: PLC0415
    from stapsdtd.kernel.tracefs import Tracefs  # noqa: PLC0415

    cleaned = clean_up(Tracefs.locate())
    print(f"removed {cleaned.events} events and {cleaned.instances} instances")
    if cleaned.failures:
        raise StapsdtdError("; ".join(cleaned.failures))


def main() -> None:
    """Exit with 0, 1 where it failed, 2 where it was called wrongly; errors are one line on standard error."""
    try:
        command(standalone_mode=False)
    except click.exceptions.Exit as finished:
        sys.exit(finished.exit_code)
    except click.ClickException as error:
        print(f"stapsdtd: {error.format_message()}; see 'stapsdtd --help'", file=sys.stderr)
        sys.exit(2)
    except (StapsdtdError, OSError) as error:
        print(f"stapsdtd: {error}", file=sys.stderr)
        sys.exit(1)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
