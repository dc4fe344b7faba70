"""Lets the core's tests import the helper modules in tests/fixtures."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "fixtures"))
