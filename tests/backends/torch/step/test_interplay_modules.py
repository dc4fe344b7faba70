"""Modules of every kind under the step: each trains as in torch's own loop, and a skipped step leaves it as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

import polyamp
from polyamp_torch.precision.torch_only.compat import NO_CPU_LSTM

INF = float("inf")
SCALER = polyamp.LossScaler.static(16.0, on_stuck="ignore")


class Attention(nn.Module):
    """`scaled_dot_product_attention` between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = self.inner(x).chunk(3, dim=-1)
        return self.outer(functional.scaled_dot_product_attention(q, k, v, is_causal=True))


class SelfAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` of one input."""

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]  # one argument is enough here
        return super().forward(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    """The outputs of a recurrent layer."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layer = kind(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)[0]


class Complex(nn.Module):
    """Real parameters, complex activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> Any:
        pairs = self.layer(x).float().unflatten(-1, (8, 2))
        return torch.fft.ifft(torch.fft.fft(torch.view_as_complex(pairs))).abs()


class Symmetric(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def symmetric() -> nn.Module:
    layer = nn.Linear(8, 8)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


MODULES: dict[str, Callable[[], nn.Module]] = {
    "attention": Attention,
    "multihead": lambda: SelfAttention(8, 2, batch_first=True),
    "encoder_layer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True),
    "encoder_norm_first": lambda: nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, activation="gelu"),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "complex": Complex,
    "parametrized": symmetric,
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(8, 8)),
    "data_parallel": lambda: nn.DataParallel(nn.Linear(8, 8)),
    "batch_norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.Flatten(0, 1), nn.BatchNorm1d(8)),
    "group_norm": lambda: nn.Sequential(nn.Conv1d(5, 4, 3), nn.GroupNorm(2, 4), nn.GELU()),
    "dropout": lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.LayerNorm(8), nn.SiLU()),
    "bilinear": lambda: nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 8, bias=False)),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[name]()


def batch(gain: float, seed: int = 0) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(seed)), "gain": torch.tensor(gain)}


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = ((model(batch["x"]).float() - 1.0) * batch["gain"]).square().mean()
    return loss


def trained(model: nn.Module, policy: Any, gains: list[float], loss_fn: Any = loss_fn) -> Any:
    recipe = polyamp.Recipe(policy=policy, optimizer=torch.optim.SGD(model.parameters(), 0.1), scaler=SCALER)
    state, step = polyamp.init(model, recipe), polyamp.train_step(loss_fn, recipe)
    torch.manual_seed(1)
    for i, gain in enumerate(gains):
        state, result = step(state, batch(gain, seed=i))
        assert bool(result.skipped) == (gain == INF)
    return state


def by_hand(model: nn.Module, region: Callable[[], Any], steps: int) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(1)
    for i in range(steps):
        optimizer.zero_grad()
        with region():
            loss = loss_fn(model, batch(1.0, seed=i))
        (loss * 16.0).backward()  # scaled here too: not every backward formula is linear in bits, `orthogonal`'s is not
        for p in model.parameters():
            p.grad = None if p.grad is None else p.grad / 16.0
        optimizer.step()
    return model


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for (name, value), expected in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, expected), name


@pytest.mark.parametrize("name", MODULES)
def test_float32_gives_the_bits_of_torchs_own_loop(name: str) -> None:
    plain = by_hand(made(name), lambda: torch.autocast("cpu", enabled=False), 3)
    assert_same(trained(made(name), "float32", [1.0] * 3).model, plain)


@pytest.mark.parametrize(  # torch has no bfloat16 LSTM on some processors: test_float32_islands says on which
    "name", [name for name in MODULES if name != "lstm" or torch.bfloat16 not in NO_CPU_LSTM]
)
def test_torchs_own_op_list_gives_the_bits_of_torchs_own_region(name: str) -> None:
    plain = by_hand(made(name), lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False), 3)
    policy = polyamp.Policy("mixed_bfloat16", op_list="native")
    assert_same(trained(made(name), policy, [1.0] * 3).model, plain)


@pytest.mark.parametrize("name", [name for name in MODULES if name not in ("encoder_layer", "dropout")])
def test_polyamps_op_list_stays_near_float32(name: str) -> None:
    """The two with dropout are left out: it draws other masks in 16 bits."""
    model, exact = (trained(made(name), policy, [1.0]).model for policy in ("mixed_bfloat16", "float32"))
    for (path, value), expected in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert value.dtype == torch.float32, path
        torch.testing.assert_close(value, expected, rtol=0.0, atol=2e-2)  # bfloat16 keeps eight bits


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("name", MODULES)
def test_a_skipped_step_leaves_parameters_and_buffers_as_they_were(name: str, policy: str) -> None:
    if name == "lstm" and policy == "mixed_float16":
        policy_ = polyamp.Policy(policy, overrides={"layer": "float32"})  # torch's CPU kernel has no float16
    else:
        policy_ = polyamp.Policy(policy)
    model, before = made(name), made(name)
    assert int(trained(model, policy_, [INF]).step) == 0
    assert_same(model, before)


def test_a_float16_lstm_is_kept_in_float32_by_an_override() -> None:
    """Of float32 inputs torch's CPU kernel has no float16 form."""
    seen: list[torch.dtype] = []

    class Tagger(nn.Sequential):
        def forward(self, x: torch.Tensor) -> Any:
            hidden = self[0](x)[0]
            output = self[1](hidden)
            seen[:] = [hidden.dtype, output.dtype]
            return output

    model = Tagger(nn.LSTM(8, 8), nn.Linear(8, 2))
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(RuntimeError, match="LSTM forward"):
        model(torch.ones(5, 2, 8))
    trained(model, polyamp.Policy("mixed_float16", overrides={"0": "float32"}), [1.0])
    assert seen == [torch.float32, torch.float16]


def test_channels_last_stays_channels_last() -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch annotates tensors' only
    layouts: list[bool] = []

    def loss_of(model: Any, batch: Any) -> torch.Tensor:
        x = batch["x"].reshape(1, 3, 5, 5).to(memory_format=torch.channels_last)
        output = model(x)
        layouts.append(output.is_contiguous(memory_format=torch.channels_last))
        loss: torch.Tensor = (output.float() * batch["gain"]).square().mean()
        return loss

    recipe = polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.adamw(1e-2), scaler=SCALER)
    state, step = polyamp.init(model, recipe), polyamp.train_step(loss_of, recipe)
    for gain in (1.0, INF, 1.0):
        step(state, {"x": torch.randn(75), "gain": torch.tensor(gain)})
    assert layouts == [True] * 3
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    assert state.optimizer.state[model.weight]["exp_avg"].is_contiguous(memory_format=torch.channels_last)


def test_hooks_fire_once_and_see_scaled_gradients() -> None:
    """As beside a `GradScaler`: a hook on a gradient runs within the backward pass, before gradients are unscaled."""
    seen: dict[float, list[Any]] = {}
    for scale in (1.0, 16.0):
        torch.manual_seed(0)
        model, log = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), seen.setdefault(scale, [])
        model[0].register_forward_hook(lambda _, __, output, log=log: log.append(output.dtype))
        model[1].register_full_backward_hook(lambda _, __, grads, log=log: log.append(grads[0].dtype))
        model[0].weight.register_hook(lambda grad, log=log: log.append(float(grad.norm())))
        model[0].weight.register_post_accumulate_grad_hook(lambda p, log=log: log.append(p.grad.dtype))
        recipe = polyamp.Recipe(
            policy="mixed_bfloat16",
            optimizer=torch.optim.SGD(model.parameters(), 0.0),
            scaler=polyamp.LossScaler.static(scale),
        )
        _, result = polyamp.train_step(loss_fn, recipe)(polyamp.init(model, recipe), batch(1.0))
        assert not bool(result.skipped)
    dtypes = [item for item in seen[16.0] if isinstance(item, torch.dtype)]
    assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32]
    (plain,), (scaled,) = ([item for item in seen[scale] if isinstance(item, float)] for scale in (1.0, 16.0))
    assert scaled == pytest.approx(16.0 * plain, rel=1e-6)


def test_a_deep_copy_of_the_model_or_of_the_state_is_on_its_own() -> None:
    state = trained(made("batch_norm"), "mixed_float16", [1.0, INF])
    model, whole = copy.deepcopy(state.model), copy.deepcopy(state)
    step = polyamp.train_step(loss_fn, state.recipe)
    step(state, batch(1.0, seed=5))
    assert not torch.equal(model[0].weight, state.model[0].weight)
    assert torch.equal(model[0].weight, whole.model[0].weight)
    polyamp.train_step(loss_fn, whole.recipe)(whole, batch(1.0, seed=5))  # its recipe holds its own optimizer
    assert_same(whole.model, state.model)
    assert int(whole.step) == int(state.step) == 2


def test_several_losses_are_summed_by_loss_fn_and_reported_apart() -> None:
    def losses(model: Any, batch: Any) -> Any:
        output = model(batch["x"]).float()
        parts = {"fit": (output - 1.0).square().mean(), "small": output.abs().mean()}
        return parts["fit"] + 0.1 * parts["small"], parts

    model = made("attention")
    recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.sgd(0.1), scaler=SCALER)
    _, result = polyamp.train_step(losses, recipe)(polyamp.init(model, recipe), batch(1.0))
    assert float(result.loss) == pytest.approx(float(result.aux["fit"] + 0.1 * result.aux["small"]), rel=1e-6)
    assert not result.aux["fit"].requires_grad


@pytest.mark.parametrize("name", ["encoder_layer", "multihead"])
def test_the_fast_path_of_evaluation_computes_as_training_does(name: str) -> None:
    """torch's fused encoder kernel, taken in eval mode under inference_mode, obeys the region."""
    model, x = made(name).eval(), batch(1.0)["x"]
    call = polyamp.Policy("mixed_bfloat16").autocast(model)
    with torch.inference_mode():
        exact, fast = model(x), call(x)
    slow = call(x).detach()
    assert fast.dtype == slow.dtype == torch.float32
    assert not torch.equal(fast, exact)
    torch.testing.assert_close(fast, slow, rtol=0.0, atol=2e-2)  # bfloat16 keeps eight bits


def test_a_model_without_an_own_forward_is_called_by_its_parts() -> None:
    model = nn.ModuleDict({"encoder": nn.Linear(8, 8), "head": nn.Linear(8, 2)})
    seen: list[torch.dtype] = []

    def by_parts(model: Any, batch: Any) -> torch.Tensor:
        hidden = model["encoder"](batch["x"])
        seen.append(hidden.dtype)
        loss: torch.Tensor = model["head"](hidden).float().square().mean()
        return loss

    trained(model, "mixed_float16", [1.0], by_parts)
    assert seen == [torch.float16]


def test_the_bound_model_is_true_as_the_module_is() -> None:
    """A module without `__len__` must not be asked for it."""
    made = polyamp.Recipe(optimizer=polyamp.sgd(0.1))
    seen: list[bool] = []

    def loss_fn(model: Any, batch: Any) -> Any:
        seen.append(bool(model))
        return model(batch).sum()

    polyamp.train_step(loss_fn, made)(polyamp.init(nn.Linear(2, 1), made), torch.ones(1, 2))
    assert seen == [True]
