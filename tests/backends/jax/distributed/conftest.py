"""Four devices on the CPU, which JAX makes where it is told so before it starts: these tests are a suite of their own
(`tests/run.py`)."""

from __future__ import annotations

import os

import jax

if "device_count" not in os.environ.get("XLA_FLAGS", ""):
    jax.config.update("jax_num_cpu_devices", 4)
