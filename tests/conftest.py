"""For all tests."""

from __future__ import annotations

import signal

# a shell has what it runs in the background ignore these, which the programs that tests start would inherit
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
