"""The torch step when a user changes by hand what `init` met: options, groups, layouts; and copies of a state."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import polyamp
from polyamp.errors import ModelError, UnsupportedError

FUSED = {
    "sgd": (polyamp.sgd(0.1, momentum=0.9), torch.optim.SGD, {"momentum": 0.9}),
    "adam": (polyamp.adam(0.1), torch.optim.Adam, {}),
    "adamw": (polyamp.adamw(0.1), torch.optim.AdamW, {}),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def batch(seed: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def loss_fn(model: Any, x: Any) -> Any:
    return model(x).square().mean()


def prepared(model: nn.Module, optimizer: Any, **options: Any) -> tuple[Any, Any]:
    recipe = polyamp.Recipe(policy="float32", optimizer=optimizer, scaler=polyamp.LossScaler(init_scale=8.0))
    return polyamp.init(model, recipe), polyamp.train_step(loss_fn, recipe, **options)


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss_fn(model, x).backward()
    optimizer.step()


def close(one: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


class Sliced(nn.Module):
    """A parameter with gaps in memory between its elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8)[:4, ::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


@pytest.mark.parametrize("name", FUSED)
def test_trap_fused_kernels_write_beside_a_parameter_with_gaps(name: str) -> None:
    spec, native, options = FUSED[name]
    models = [Sliced() for _ in range(3)]
    for model, fused in zip(models, (False, True), strict=False):
        by_hand(model, native(model.parameters(), 0.1, fused=fused, **options), batch(0))
    right, wrong, ours = models
    assert not torch.allclose(right.weight, wrong.weight), "what torch does by itself"
    state, step = prepared(ours, spec)
    step(state, batch(0))
    close(ours, right)
    message = r"gaps in memory.*shape \(4, 4\) and strides \(8, 2\)\. Use fused=False"
    with pytest.raises(UnsupportedError, match=message):
        prepared(wrong, native(wrong.parameters(), 0.1, fused=True))


def test_an_expanded_parameter_is_refused() -> None:
    """Its elements share memory: torch's fused kernels write past its end."""
    model = network()
    model.gain = nn.Parameter(torch.ones(1).expand(4))
    with pytest.raises(ModelError, match="'gain' is expanded: several of its 4 elements are one number in memory"):
        prepared(model, polyamp.sgd(0.1))


@pytest.mark.parametrize("name", FUSED)
def test_trap_another_memory_format_mixes_up_the_fused_kernels_state(name: str) -> None:
    """They go through parameter, gradient and moments in the order in which each lies in memory."""
    spec, native, options = FUSED[name]

    def conv() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4, 2))

    def image(seed: int) -> torch.Tensor:
        return torch.randn(2, 3, 2, 2, generator=torch.Generator().manual_seed(seed))

    models = [conv() for _ in range(2)]
    for model, fused in zip(models, (False, True), strict=True):
        optimizer = native(model.parameters(), 0.1, fused=fused, **options)
        by_hand(model, optimizer, image(0))
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's annotation lacks it
        by_hand(model, optimizer, image(1))
    (right, *_), (wrong, *_) = (list(model.parameters()) for model in models)
    assert not torch.allclose(right, wrong), "what torch does by itself"
    model = conv()
    state, step = prepared(model, spec)
    step(state, image(0))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's annotation lacks it
    message = r"'0/weight' was laid out with strides \(12, 4, 2, 1\) at init\. Received: strides \(12, 1, 6, 3\)"
    with pytest.raises(ModelError, match=message):
        step(state, image(1))


def test_a_transposed_matrix_alone_has_a_norm() -> None:
    """Laid end to end it is one tensor, which cannot be viewed as a vector."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(16.0).reshape(4, 4).t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    model = Turned()
    state, step = prepared(model, polyamp.sgd(0.1))
    (wanted,) = torch.autograd.grad(loss_fn(model, batch(0)), [model.weight])
    _, result = step(state, batch(0))
    assert float(result.grad_norm) == pytest.approx(float(wanted.norm()), rel=1e-6)


@pytest.mark.parametrize(
    ("spec", "option", "value", "compiled"),
    [
        (polyamp.adam(0.1), "amsgrad", True, False),
        (polyamp.adamw(0.1), "amsgrad", True, False),
        (polyamp.adamw(0.1), "amsgrad", True, {"backend": "eager"}),
        (polyamp.adam(0.1, weight_decay=0.1), "decoupled_weight_decay", True, False),
        (polyamp.adamw(0.1), "decoupled_weight_decay", False, False),
    ],
)
def test_options_that_a_spec_does_not_have_are_refused(spec: Any, option: str, value: bool, compiled: Any) -> None:
    model = network()
    state, step = prepared(model, spec, compile=compiled)
    step(state, batch(0))
    before = [p.detach().clone() for p in model.parameters()]
    state.optimizer.param_groups[0][option] = value
    kind = type(spec).__name__
    with pytest.raises(
        UnsupportedError, match=rf"{kind} has no such option.*torch\.optim\.{kind}\(\.\.\., {option}={value}"
    ):
        step(state, batch(1))
    assert all(torch.equal(old, p) for old, p in zip(before, model.parameters(), strict=True))


def test_options_that_a_compiled_step_does_not_have_are_refused_and_groups_count() -> None:
    state, step = prepared(network(), polyamp.sgd(0.1, momentum=0.9), compile={"backend": "eager"})
    (group,) = state.optimizer.param_groups
    group["dampening"] = 0.5
    with pytest.raises(UnsupportedError, match=r"dampening=0\.5: the formula of SGD has none\. Use compile=False"):
        step(state, batch(0))
    group["dampening"] = 0
    first, rest = group["params"][:2], group["params"][2:]
    state.optimizer.param_groups = [{**group, "params": first, "lr": 0.0}, {**group, "params": rest}]
    before = [p.detach().clone() for p in group["params"]]
    step(state, batch(0))
    assert [torch.equal(p, old) for p, old in zip(group["params"], before, strict=True)] == [True] * 2 + [False] * len(
        rest
    )


def test_foreach_written_beside_fused() -> None:
    """torch's SGD then runs its kernels that take no flag and no divisor."""
    one, other = network(), network()
    mine, theirs = (torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=True) for model in (one, other))
    state, step = prepared(one, mine)
    for seed in range(3):
        if seed == 1:
            mine.param_groups[0]["foreach"] = theirs.param_groups[0]["foreach"] = True
        step(state, batch(seed))
        by_hand(other, theirs, batch(seed))
    close(one, other)


def reverse(optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].reverse()


def divide(optimizer: Any) -> None:
    (group,) = optimizer.param_groups
    parameters = group["params"]
    optimizer.param_groups = [{**group, "params": parameters[:2]}, {**group, "params": parameters[2:], "lr": 0.01}]


@pytest.mark.parametrize("change", [reverse, divide])
@pytest.mark.parametrize("name", FUSED)
def test_groups_in_another_order_or_divided_count(name: str, change: Callable[[Any], None]) -> None:
    spec, native, options = FUSED[name]
    one, other = network(), network()
    state, step = prepared(one, spec)
    theirs = native(other.parameters(), 0.1, foreach=False, **options)
    for seed in range(4):
        if seed == 2:
            change(state.optimizer)
            change(theirs)
        step(state, batch(seed))
        by_hand(other, theirs, batch(seed))
    close(one, other)


def test_a_parameter_twice_in_the_optimizer_is_refused() -> None:
    model = network()
    with pytest.warns(UserWarning, match="duplicate parameters"):
        native = torch.optim.SGD([*model.parameters(), *model.parameters()], 0.1)
    with pytest.raises(UnsupportedError, match="exactly the model's trainable parameters, each once"):
        prepared(model, native)


@pytest.mark.parametrize(
    ("lazy", "name"), [(nn.LazyLinear(4), "parameter '1/weight'"), (nn.LazyBatchNorm1d(), "parameter '1/weight'")]
)
def test_lazy_modules_are_refused_by_name_until_they_have_a_shape(lazy: nn.Module, name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), lazy)
    with pytest.raises(ModelError, match=rf"{name} has no shape yet\. Call the model once"):
        prepared(model, polyamp.sgd(0.1))
    model(batch(0))
    state, step = prepared(model, polyamp.sgd(0.1))
    assert int(step(state, batch(0))[1].step) == 1


def test_a_lazy_buffer_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyBatchNorm1d(affine=False))
    with pytest.raises(ModelError, match="buffer '1/running_mean' has no shape yet"):
        prepared(model, polyamp.sgd(0.1))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize(
    "spec", [*(found[0] for found in FUSED.values()), polyamp.rmsprop(0.1), polyamp.adagrad(0.1), polyamp.lion(0.1)]
)
def test_a_copy_of_a_state_trains_its_own_model_alike(spec: Any, copied: Callable[[Any], Any]) -> None:
    state, step = prepared(network(), spec)
    step(state, batch(0))
    other = copied(state)
    export = state.backend.export_state
    before = export(state)
    step(other, batch(1))
    after = export(state)
    assert [name for name in before if before[name].tobytes() != after[name].tobytes()] == []
    step(state, batch(1))
    mine, theirs = export(state), export(other)
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if mine[name].tobytes() != theirs[name].tobytes()] == []


@pytest.mark.parametrize("at", [0, 1, 2])
def test_s20_a_model_that_loss_fn_changes_between_micro_batches_is_refused_whole(at: int) -> None:
    """The look at the model is one at the start and one before the update, however many micro-batches lie between."""
    calls: list[int] = []

    def freezing(model: Any, x: Any) -> Any:
        loss = loss_fn(model, x[0])
        if len(calls) == at:
            model[0].bias.requires_grad_(False)
        calls.append(1)
        return loss

    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adamw(0.1), accumulate_steps=3)
    state = polyamp.init(network(), recipe)
    before = state.backend.export_state(state)
    with pytest.raises(ModelError, match="'0/bias' was frozen after init"):
        polyamp.train_step(freezing, recipe)(state, [(batch(seed),) for seed in range(3)])
    after = state.backend.export_state(state)
    assert [name for name in before if before[name].tobytes() != after[name].tobytes()] == []
