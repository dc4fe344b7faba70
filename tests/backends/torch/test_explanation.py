"""docs/explanation/why_three_frameworks_differ.md: torch's defaults are those of its table."""

from __future__ import annotations

import torch

from tests.explanation import actual_defaults, stated_defaults


def test_the_defaults_are_torchs() -> None:
    assert stated_defaults("torch") == actual_defaults(
        {
            "epsilon of LayerNorm": (torch.nn.LayerNorm, "eps"),
            "epsilon of BatchNorm": (torch.nn.BatchNorm2d, "eps"),
            "momentum of BatchNorm": (torch.nn.BatchNorm2d, "momentum"),
            "epsilon of GroupNorm": (torch.nn.GroupNorm, "eps"),
            "epsilon of Adam": (torch.optim.Adam, "eps"),
            "decay of AdamW": (torch.optim.AdamW, "weight_decay"),
            "smoothing of RMSprop": (torch.optim.RMSprop, "alpha"),
            "slope of the leaky ReLU": (torch.nn.LeakyReLU, "negative_slope"),
            "GELU by tanh": (torch.nn.GELU, "approximate"),
            "initial loss scale": (torch.amp.GradScaler, "init_scale"),
        }
    )
