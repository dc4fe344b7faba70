"""Lets the core's tests import the helper modules in tests/fixtures, and the processes that they start hear Ctrl-C."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "fixtures"))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job, which hands that on
    signal.signal(signal.SIGINT, signal.default_int_handler)
