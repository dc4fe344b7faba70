"""Public import path of the Lightning integration; see `integrations.lightning`."""

from __future__ import annotations

from polyamp_torch.integrations.lightning import FabricPrecision, MixedPrecision

__all__ = ["FabricPrecision", "MixedPrecision"]
