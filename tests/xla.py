"""XLA's cheapest code: the same programs, compiled in a quarter of the time. Used by the tests of JAX and TensorFlow.

A test compiles a small program and runs it a few times, so what it waits for is the compiler. These settings leave out
what LLVM does to make code quick and the separate code for fused loops; XLA's own passes over the program, and with
them what polyamp has to stand up to (fusion, excess precision, reordered sums), stay. The examples and the README's
blocks run as users run them, and the benchmarks when they are to measure something.

    pytest -p tests.xla --pyargs polyamp.conformance --polyamp-backend=jax
"""

from __future__ import annotations

import contextlib
import os
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

FLAGS: Final = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)
CONSTRAINTS: Final = Path(__file__).parents[1] / "constraints.txt"
COMPILERS: Final = ("jaxlib", "tensorflow")
"""Distributions that bring an XLA each. Both read `XLA_FLAGS`; TensorFlow compiles float16 steps on a CPU with it."""


def known() -> bool:
    """Whether the installed compilers are the pinned ones: XLA ends the process over a flag that it does not know."""
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE))
    installed = {}
    for name in COMPILERS:
        with contextlib.suppress(PackageNotFoundError):
            installed[name] = version(name)
    return bool(installed) and all(pinned.get(name) == found for name, found in installed.items())


def quick() -> None:
    """For this process and those that it starts, unless `XLA_FLAGS` says something already. XLA reads them once, when
    the first program is compiled."""
    if known():
        os.environ.setdefault("XLA_FLAGS", FLAGS)


def pytest_configure() -> None:
    quick()
