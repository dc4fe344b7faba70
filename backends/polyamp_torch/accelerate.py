"""polyamp in Hugging Face Accelerate, under the name that users import; see `integrations.accelerate`."""

from __future__ import annotations

from polyamp_torch.integrations.accelerate import Accelerator

__all__ = ["Accelerator"]
