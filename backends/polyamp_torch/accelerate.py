"""Public import path of the Hugging Face Accelerate integration; see `integrations.accelerate`."""

from __future__ import annotations

from polyamp_torch.integrations.accelerate import Accelerator

__all__ = ["Accelerator"]
