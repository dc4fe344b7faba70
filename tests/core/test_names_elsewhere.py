"""Names that people look for in `polyamp` and that stand in the package of one framework: the error says where."""

from __future__ import annotations

import pytest

import polyamp


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("compile", r"polyamp_tensorflow\.compile\(model, recipe, loss=.*polyamp.train_step.*compile=True"),
        ("GradScaler", "polyamp_torch.GradScaler"),
        ("autocast", r"policy\.autocast.*polyamp_torch.autocast"),
        ("LossScaleOptimizer", "polyamp_tensorflow.LossScaleOptimizer"),
        ("apply_policy", "polyamp_tensorflow.apply_policy"),
        ("scaled_value_and_grad", "polyamp_jax.scaled_value_and_grad"),
    ],
)
def test_the_error_says_where_a_name_is(name: str, place: str) -> None:
    with pytest.raises(AttributeError, match=place):
        getattr(polyamp, name)
    assert not hasattr(polyamp, name)
