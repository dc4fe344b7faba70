"""The command `python benchmarks/gpu.py`; `benchmarks/gpu/driver.py` is what it runs, and says what is measured."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[1])]  # this folder's torch/ and jax/ are not the frameworks

from benchmarks.gpu import driver

if __name__ == "__main__":
    sys.exit(driver.main())
