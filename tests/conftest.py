"""Tests, and the processes that they start, hear Ctrl-C, however they were started themselves."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job, which hands that on
    signal.signal(signal.SIGINT, signal.default_int_handler)
