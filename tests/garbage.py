"""Python's search for garbage in cycles, made seldom: a plugin of pytest that `tests/run.py` gives every suite.

A framework that traces a program makes millions of objects that live for a moment. The search, which Python makes at
every 700 more objects than before, took a tenth of the processor time of the tests of JAX and torch.

    pytest -p tests.garbage tests/backends/jax
"""

from __future__ import annotations

import gc


def search_seldom() -> None:
    """For this process."""
    gc.set_threshold(50_000, 10, 10)


def pytest_configure() -> None:
    search_seldom()
