"""What holds for tests, and for the processes that they start: one thread of OpenMP each, and Ctrl-C is heard."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; tests/run.py says why
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job, which hands that on
    signal.signal(signal.SIGINT, signal.default_int_handler)
