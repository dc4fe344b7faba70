"""The pages for those who come from another torch library: both sides of each diff train to the same weights.

Apex and DeepSpeed are not installed: small modules of their names do the documented arithmetic.
"""

from __future__ import annotations

from typing import Any

import pytest
from accelerate.state import AcceleratorState, GradientState
from torch import nn

from tests.page_diffs import run_side

# Lightning 2.6 asks torch's pytree in a way that torch 2.13 deprecates, and advises more workers for loaders.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers:UserWarning"),
]


def furthest(one: nn.Module, other: nn.Module) -> float:
    """The largest difference of two models' weights."""
    others = list(other.parameters())
    pairs = zip(one.parameters(), others, strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def sides(page: str, **names: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The names of the script before, and of the one after."""
    before = run_side(page, "-", dict(names))
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return before, run_side(page, "+", dict(names))


def test_from_accelerate() -> None:
    before, after = sides("from_accelerate")
    assert int(after["state"].step) == 4
    models = [before["trained"], before["accelerator"].unwrap_model(before["model"]), after["trained"]]
    assert [furthest(model, after["state"].model) < 1e-6 for model in models] == [True] * 3
    assert type(after["accelerator"]).__module__.startswith("polyamp_torch")


def test_from_lightning() -> None:
    before, after = sides("from_lightning")
    assert int(after["state"].step) == 4
    assert after["trainer"].precision == "bf16-mixed"
    for model in (before["module"].net, after["module"].net):
        assert furthest(model, after["net"]) < 1e-6
    assert furthest(before["net"], before["Classifier"]().net) > 1e-2
