"""polyamp in Lightning, under the name that users import; see `integrations.lightning`."""

from __future__ import annotations

from polyamp_torch.integrations.lightning import FabricPrecision, MixedPrecision

__all__ = ["FabricPrecision", "MixedPrecision"]
