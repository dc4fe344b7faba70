"""S3: a `torch.autocast` of somebody else's around a step, its halves or `GradScaler` changes no bit of the result.

Adafactor stands for the optimizers whose update multiplies matrices, which autocast would round.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import polyamp
import polyamp_torch
from polyamp_torch.arrays import to_numpy

SCALER = polyamp.LossScaler(init_scale=8.0)
POLICIES = {
    "float32": polyamp.Policy("float32"),
    "mixed_bfloat16": polyamp.Policy("mixed_bfloat16"),
    "native": polyamp.Policy("mixed_bfloat16", op_list="native"),
    "cast": polyamp.Policy("mixed_bfloat16", mode="cast"),
    "bfloat16": polyamp.Policy("bfloat16"),
}
REGIONS: dict[str, Callable[[], Any]] = {
    "float16": lambda: torch.autocast("cpu", torch.float16),
    "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "ours": lambda: polyamp_torch.autocast("mixed_float16", "cpu"),
    "nested": lambda: _nested(),
}


@contextlib.contextmanager
def _nested() -> Any:
    off = torch.autocast("cpu", enabled=False)
    with torch.autocast("cpu", torch.bfloat16), off, polyamp_torch.autocast("mixed_bfloat16", "cpu"):
        yield


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


def batch() -> torch.Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
    """One layer runs again in the backward pass."""
    hidden = checkpoint(lambda x: torch.tanh(model[0](x.to(model[0].weight.dtype))), x, use_reentrant=False)
    loss: torch.Tensor = (model(x) * 1000.0).float().square().mean() + hidden.float().square().mean()
    return loss


def trained(policy: polyamp.Policy, way: str, around: Callable[[], Any]) -> dict[str, Any]:
    """Everything that two steps leave behind, and what they report."""
    model = network(torch.bfloat16 if policy.param == "bfloat16" else torch.float32)
    optimizer: Any = torch.optim.Adafactor(model.parameters(), lr=0.1)
    if way == "compiled":
        optimizer = polyamp.adamw(0.1)
    recipe = polyamp.Recipe(policy=policy, optimizer=optimizer, scaler=SCALER, clip_norm=1.0)
    state: Any = polyamp.init(model, recipe)
    seen: dict[str, Any] = {}
    if way == "halves":
        half = polyamp.value_and_grad(loss_fn)
    else:
        how = {"backend": "eager"} if way == "compiled" else False
        step = polyamp.train_step(plain if way == "compiled" else loss_fn, recipe, compile=how)
    for number in range(2):
        with around():
            if way == "halves":
                seen[f"loss{number}"], gradients = half(state, batch())
                seen |= {f"grad{number}/{name}": value for name, value in gradients.values.items()}
                state, result = polyamp.apply_gradients(state, gradients)
            else:
                state, result = step(state, batch())
                seen[f"loss{number}"] = result.loss
        seen[f"norm{number}"] = result.grad_norm
    return seen | dict(state.export())


def plain(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x) * 1000.0).float().square().mean()
    return loss


EAGER = [(way, policy, region) for way in ("step", "halves") for policy in POLICIES for region in REGIONS]
COMPILED = [("compiled", "float32", "float16"), ("compiled", "mixed_bfloat16", "ours"), ("compiled", "cast", "float16")]


@pytest.mark.parametrize(("way", "policy", "region"), EAGER + COMPILED)
def test_s03_a_region_around_a_step_touches_nothing_in_it(way: str, policy: str, region: str) -> None:
    alone = trained(POLICIES[policy], way, contextlib.nullcontext)
    inside = trained(POLICIES[policy], way, REGIONS[region])
    assert alone.keys() == inside.keys()
    parted = [name for name in alone if not _same(alone[name], inside[name])]
    assert parted == []
    assert torch.is_autocast_enabled("cpu") is False


def _same(one: Any, other: Any) -> bool:
    one, other = (to_numpy(value) if isinstance(value, torch.Tensor) else value for value in (one, other))
    return bool(one.dtype == other.dtype and one.tobytes() == other.tobytes())


def loop(scaler: Any, around: Callable[[], Any], *, unscale: bool) -> list[torch.Tensor]:
    """The weights behind two iterations, with the backward pass behind the region."""
    model = network()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = plain(model, batch())
        with around():
            scaled = scaler.scale(loss)
        scaled.backward()
        with around():
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("region", REGIONS)
def test_s03_a_region_around_grad_scaler_touches_nothing_in_it(region: str, unscale: bool, enabled: bool) -> None:
    def made() -> Any:
        return polyamp_torch.GradScaler(SCALER, enabled=enabled)

    alone = loop(made(), contextlib.nullcontext, unscale=unscale)
    inside = loop(made(), REGIONS[region], unscale=unscale)
    assert all(map(torch.equal, alone, inside))
    if region == "bfloat16":
        theirs = loop(torch.amp.GradScaler("cpu", init_scale=8.0), REGIONS[region], unscale=unscale)
        assert not all(map(torch.equal, alone, theirs)), "or this would show nothing"


def test_s03_a_backward_pass_of_the_loops_own_inside_a_region_is_said_once() -> None:
    """It cannot be shielded: autograd takes the region along when `backward()` is called. It is torch's, and said."""

    def gradients(scaler: Any, around: Callable[[], Any]) -> list[torch.Tensor]:
        model = network()
        loss = scaler.scale(plain(model, batch()))
        with around():
            loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    scaler, inside = polyamp_torch.GradScaler(SCALER), REGIONS["bfloat16"]
    with pytest.warns(UserWarning, match=r"backward\(\) runs inside an autocast region: .* in torch.bfloat16") as said:
        ours = gradients(scaler, inside)
    assert said[0].filename == __file__
    theirs = gradients(torch.amp.GradScaler("cpu", init_scale=8.0), inside)
    assert all(map(torch.equal, ours, theirs))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients(scaler, inside)
        gradients(polyamp_torch.GradScaler(SCALER), contextlib.nullcontext)


@pytest.mark.parametrize("halves", [False, True], ids=["step", "halves"])
def test_s03_a_region_that_stays_open_computes_with_the_new_weights(halves: bool) -> None:
    """autocast keeps the casts of weights until its region ends, as long as nobody tells it that they have changed."""
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
    model, x = network(), batch()
    state = polyamp.init(model, recipe)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
        if halves:
            state, _ = polyamp.apply_gradients(state, polyamp.value_and_grad(loss_fn)(state, x)[1])
        else:
            state, _ = polyamp.train_step(loss_fn, recipe)(state, x)
        within = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(within, model(x))
