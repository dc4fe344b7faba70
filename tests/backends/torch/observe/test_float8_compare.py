"""`polyamp.compare` of float8 with bfloat16: the rounding of S36 is no difference, and a wrong product is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import polyamp
from polyamp import Float8, Policy, Recipe
from polyamp_torch.observe.op_dtypes import OpDtypeRecorder
from polyamp_torch.precision.torch_only import float8_products

GUIDE = (Path(__file__).parents[4] / "docs" / "guides" / "float8.md").read_text(encoding="utf-8")
POLICY = Policy("mixed_float8", float8=Float8(emulate=True))
RECIPE = Recipe(policy=POLICY, optimizer=polyamp.adamw(1e-2), clip_norm=1.0)
BOTH = (RECIPE.replace(policy="mixed_bfloat16"), RECIPE)


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"])


def batches(step: int) -> Any:
    rng = np.random.default_rng(step)
    return {"x": rng.standard_normal((16, 32)).astype(np.float32), "y": rng.integers(0, 10, 16)}


def test_s36_rounding_to_8_bits_is_no_difference() -> None:
    report = polyamp.compare(make(), make(), batches, loss_fn, BOTH, steps=2)
    assert report.agrees, str(report)
    assert report.phases[-1].startswith("mixed_bfloat16 / ")


def test_s36_a_wrong_scale_of_activations_is_one_in_the_first_product(monkeypatch: pytest.MonkeyPatch) -> None:
    quantize = float8_products.quantize

    def wrong(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        codes = quantize(x, *args, **kwargs)
        return codes._replace(exponent=codes.exponent + 1) if x.shape == (16, 32) else codes

    monkeypatch.setattr(float8_products, "quantize", wrong)
    report = polyamp.compare(make(), make(), batches, loss_fn, BOTH, steps=1)
    assert not report.agrees
    text = str(report)
    assert "step 1, forward, 0 (output)" in text.splitlines()[0]
    assert "float32 in torch b" not in text  # an emulated product is none that one side keeps in float32


@pytest.mark.parametrize("native", [False, True])
def test_an_operation_in_8_bits_is_recorded_once_in_the_compute_dtype(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float8_products, "multiplies_float8", lambda device_type: True)
    policy = Policy("mixed_float8") if native else POLICY
    recorder = OpDtypeRecorder()
    recorder.active = True
    model = policy.autocast(nn.Linear(32, 16))
    with recorder:
        model(torch.ones(16, 32))
    products = [(row.name, row.dtype, row.count) for row in recorder.rows if row.name != "add"]
    assert products == [("scaled_mm" if native else "matmul", "bfloat16", 1)]


def test_the_guides_comparison_runs() -> None:
    (code,) = [each.split("```")[0] for each in GUIDE.split("```py\n")[1:] if "polyamp.compare" in each]
    scope = {"polyamp": polyamp, "make_model": make, "batches": batches, "loss_fn": loss_fn, "recipe": RECIPE}
    exec(compile(code, "docs/guides/float8.md", "exec"), scope)
    assert scope["report"].agrees
