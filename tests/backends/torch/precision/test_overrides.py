"""Overrides and dtypes to which torch.autocast casts nothing: they compute as they say, or are refused by name (S5)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import polyamp
from polyamp.errors import UnsupportedError

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1), nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))).to(dtype)


def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
    return polyamp.losses.mean_squared_error(model(x), x[:, :2])


@pytest.mark.parametrize("options", [{}, {"compile": {"backend": "aot_eager"}}], ids=["eager", "compiled"])
@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_s05_a_module_in_16_bits_under_float32_is_that_of_autocast_around_it(narrow: str, options: Any) -> None:
    recipe = polyamp.Recipe(policy=polyamp.Policy("float32", overrides={"0": narrow}), optimizer=polyamp.sgd(0.1))
    model, by_hand = network(), network()
    _, result = polyamp.train_step(loss_fn, recipe, **options)(polyamp.init(model, recipe), X)
    with torch.autocast("cpu", getattr(torch, narrow), cache_enabled=False):
        hidden = by_hand[0](X)
    loss = (by_hand[1:](hidden.float()) - X[:, :2]).square().mean()
    loss.backward()
    assert result.loss.item() == loss.item()
    for p, q in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert q.grad is not None
        torch.testing.assert_close(p.detach(), q.detach() - 0.1 * q.grad, rtol=1e-6, atol=1e-7)


def test_s05_an_override_inside_another_goes_on_in_its_dtype() -> None:
    overrides = {"2": "bfloat16", "2/0": "float32"}
    bound = polyamp.Policy("float32", overrides=overrides).autocast(model := network())
    seen: list[torch.dtype] = []
    model[2][1].register_forward_hook(lambda _, given, out: seen.extend([given[0].dtype, out.dtype]))
    assert bound(X).dtype == torch.float32
    assert seen == [torch.float32, torch.bfloat16]  # autocast acts there, and casts what it needs


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        (polyamp.Policy("bfloat16", overrides={"0": "float32"}), "the module '0' would have to compute in float32"),
        (polyamp.Policy("float64", overrides={"2": "bfloat16"}), "the module '2' would have to compute in bfloat16"),
        (
            polyamp.Policy(param="float64", compute="bfloat16"),
            "the model would have to compute in bfloat16",
        ),
        (polyamp.Policy("float32", overrides={"0": "float64"}), r"compute in float64 .* Use param='float64'"),
        (polyamp.Policy("mixed_bfloat16", mode="cast", overrides={"0": "float64"}), "compute in float64"),
    ],
)
def test_s20_what_autocast_does_not_cast_is_refused_by_name(policy: polyamp.Policy, named: str) -> None:
    """torch says that mat1 and mat2 must have the same dtype; or, under float64 parameters, computes in float64."""
    model = network(getattr(torch, policy.param))
    with pytest.raises(UnsupportedError, match=named):
        polyamp.init(model, polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1)))
    with pytest.raises(UnsupportedError, match=named):
        policy.autocast(model)


@pytest.mark.parametrize("param", ["bfloat16", "float64"])
def test_s05_a_module_without_parameters_and_mode_cast_take_any_dtype(param: str) -> None:
    x = X.to(getattr(torch, param))
    for policy in (
        polyamp.Policy(param, overrides={"1": "float32"}),
        polyamp.Policy(param, mode="cast", overrides={"0": "float32"}),
    ):
        model = network(x.dtype)
        assert policy.autocast(model)(x).dtype == x.dtype
        state = polyamp.init(model, polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1)))
        assert bool(polyamp.train_step(loss_fn, state.recipe)(state, x)[1].loss.isfinite())


@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_s02_mode_cast_casts_float64_inputs_under_float64_parameters(compute: Any) -> None:
    policy = polyamp.Policy(param="float64", compute=compute, output="float64", mode="cast")
    seen: list[tuple[torch.dtype, ...]] = []

    class Sum(nn.Linear):
        def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            seen.append((x.dtype, other.dtype))
            return super().forward(x + other)

    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1))
    state = polyamp.init(Sum(4, 2).double(), recipe)
    x = torch.ones(3, 4, dtype=torch.float64)
    polyamp.value_and_grad(lambda model, x: model(x, other=x).square().mean())(state, x)
    assert seen == [(getattr(torch, compute),) * 2]
