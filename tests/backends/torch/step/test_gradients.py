"""The step's kernels over all gradients: norm, flag, unscaling and clipping at the edges of float32, and who looks."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import polyamp
from polyamp.recipe.clip_limits import ClipLimits
from polyamp.rules import clip, group_members
from polyamp_torch.arrays import can_read_without_sync
from polyamp_torch.step import grad_stats
from polyamp_torch.step.grad_stats import global_norm, global_norm_and_finite, unscale_and_clip_divisor

LARGEST = torch.finfo(torch.float32).max
INF, NAN = float("inf"), float("nan")


def refuse_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens on an accelerator, on the CPU: nothing may be read on the host."""
    for name, module in list(sys.modules.items()):
        if name.startswith("polyamp_torch.") and can_read_without_sync in vars(module).values():
            monkeypatch.setattr(module, "can_read_without_sync", lambda device: False)


@pytest.fixture(params=["looking", "blind"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways through the step: the CPU's, and that of every other device."""
    if request.param == "blind":
        refuse_to_look(monkeypatch)
    return str(request.param)


EDGES: list[tuple[str, list[torch.Tensor], float, float, bool]] = [
    ("ordinary", [torch.tensor([24.0, 32.0])], 8.0, 5.0, True),
    ("scalars and empty tensors", [torch.tensor(3.0), torch.zeros(0, 4), torch.tensor([4.0])], 1.0, 5.0, True),
    ("squares overflow", [torch.full((2,), 1e30)], 1.0, math.sqrt(2) * 1e30, True),
    ("squares vanish", [torch.full((4,), 1e-30)], 1.0, 2e-30, True),
    ("squares overflow, scaled", [torch.full((4,), 1e30)], 2.0**24, 2e30 / 2.0**24, True),
    ("the norm leaves float32, no gradient does", [torch.full((4,), 3e38)], 1.0, 6e38, True),
    ("the same after unscaling", [torch.full((100,), 1.6e38)], 0.5, 3.2e39, True),
    ("overflow by unscaling", [torch.tensor([1.8e38, 0.0])], 0.5, 3.6e38, False),
    ("overflow by unscaling at the floor", [torch.full((3,), 1e36)], 2.0**-14, math.sqrt(3) * 2.0**14 * 1e36, False),
    ("underflow by unscaling", [torch.full((4,), 2.0**-133)], 2.0**24, 2.0**-132 / 2.0**24, True),
    ("a scale of 2^127", [torch.full((4,), 2.0**100)], 2.0**127, 2.0**-26, True),
    ("a scale of 2^-126", [torch.full((4,), 1e-38)], 2.0**-126, 2e-38 * 2.0**126, True),
    ("NaN", [torch.ones(3), torch.tensor([1.0, NAN])], 4.0, NAN, False),
    ("inf", [torch.ones(3), torch.tensor([1.0, INF])], 4.0, INF, False),
    ("-inf", [torch.tensor([-INF, 1.0])], 4.0, INF, False),
    ("inf beside NaN", [torch.tensor([INF, NAN])], 4.0, NAN, False),
    ("bfloat16", [torch.full((4,), 8.0, dtype=torch.bfloat16)], 4.0, 4.0, True),
    ("bfloat16, squares overflow", [torch.full((4,), 2.0**100, dtype=torch.bfloat16)], 4.0, 2.0**99, True),
    ("bfloat16 overflows by unscaling", [torch.full((1,), 3e38, dtype=torch.bfloat16)], 0.5, 6e38, False),
    ("float16 overflows by unscaling", [torch.full((1,), 6e4, dtype=torch.float16)], 0.5, 1.2e5, False),
    ("two dtypes", [torch.full((9,), 1.0), torch.full((16,), 1.0, dtype=torch.float64)], 1.0, 5.0, True),
]


@pytest.mark.parametrize(("grads", "scale", "norm", "finite"), [row[1:] for row in EDGES], ids=[r[0] for r in EDGES])
@pytest.mark.usefixtures("way")
def test_s10_norm_and_flag_at_the_edges(grads: list[torch.Tensor], scale: float, norm: float, finite: bool) -> None:
    before = [grad.clone() for grad in grads]
    found = global_norm_and_finite(grads, torch.tensor(scale))
    assert (found.norm.dtype, found.finite.dtype, found.finite.shape) == (torch.float64, torch.bool, ())
    assert bool(found.finite) is finite
    assert found.norm.item() == pytest.approx(
        norm, rel=5e-3 if grads[0].dtype.itemsize == 2 else 1e-6, abs=0.0, nan_ok=True
    )
    assert all(torch.equal(old.nan_to_num(), grad.nan_to_num()) for old, grad in zip(before, grads, strict=True))
    by_hand = all((grad.double() / scale).to(grad.dtype).isfinite().all() for grad in grads)
    assert finite is by_hand, "S10: after unscaling"


@pytest.mark.parametrize("size", [1e-170, 1e170])
def test_s10_float64_gradients_whose_squares_leave_float64(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    grads = [torch.full((4,), size, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)]
    found = global_norm_and_finite(grads)
    assert found.norm.item() == pytest.approx(2 * size, rel=1e-12, abs=0.0)
    assert bool(found.finite)
    refuse_to_look(monkeypatch)
    assert bool(global_norm_and_finite(grads).finite) is (size < 1.0), "elsewhere the largest count as not finite"


def test_s10_a_known_least_scale_spares_the_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to_look(monkeypatch)
    seen: list[float] = []
    kernel = torch._foreach_norm

    def counted(tensors: Any, order: float = 2, **kwargs: Any) -> Any:
        seen.append(order)
        return kernel(tensors, order, **kwargs)

    monkeypatch.setattr(grad_stats, "foreach_norm", counted)
    grads, scale = [torch.ones(4)], torch.tensor(4.0)
    global_norm_and_finite(grads, scale, least=1.0)
    assert seen == [2]
    global_norm_and_finite(grads, scale, least=2.0**-14)
    assert seen == [2, 2, INF]


def test_s10_trap_torchs_norm_of_a_large_tensor_is_off_and_this_is_not() -> None:
    """The CPU's float32 sum runs through a few long chains of additions."""
    grad = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    exact = grad.double().norm().item()
    native = nn.utils.get_total_norm([grad]).item() if hasattr(nn.utils, "get_total_norm") else grad.norm().item()
    assert abs(native - exact) / exact > 2e-6
    for layout in (grad, grad.view(1024, 1024), grad[: 1 << 19]):
        assert global_norm([layout]).item() == pytest.approx(layout.double().norm().item(), rel=1e-6)


def test_s10_norm_of_any_layout() -> None:
    values = torch.randn(8, 6, 5, 5, generator=torch.Generator().manual_seed(0))
    whole = values.double().norm().item()
    for grads in (
        [values.to(memory_format=torch.channels_last)],
        [values.permute(3, 1, 0, 2)],
        list(values.unbind()),
        [values[::2], values[1::2]],
    ):
        assert global_norm(grads).item() == pytest.approx(whole, rel=1e-6)


LENGTHS = {
    "all": [1, 2_048, 2_049, 16_384, 65_536, 65_537, 5 * 16_384, 5 * 16_384 + 3],
    "rows": [5 * 16_384],
    "several vectors": [2_048] * 33 + [1],
}
"""Around the sizes at which tensors are laid end to end, summed where they lie, or in rows with and without a rest."""


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(
    ("dtype", "size", "bound"),
    [
        (torch.float32, 1.0, 1e-6),
        (torch.float32, 1e30, 1e-6),
        (torch.float64, 1.0, 1e-12),
        (torch.float64, 1e-170, 1e-12),
        (torch.float64, 1e170, 1e-12),
    ],
)
def test_s10_every_number_counts_whatever_the_size_of_its_tensor(
    dtype: torch.dtype, size: float, bound: float, lengths: list[int]
) -> None:
    """One number of each tensor is large, in turn: what is left out would be missed."""
    exact = size * math.sqrt(sum(lengths) - 1 + 1000.0**2)
    for number, length in enumerate(lengths):
        for place in {0, length // 2, length - 1}:
            grads = [torch.full((other,), size, dtype=dtype) for other in lengths]
            grads[number][place] = 1000.0 * size  # its square and all sums are integers below 2^24
            for layout in (grads, [torch.stack([grad, grad], dim=1)[:, 0] for grad in grads]):
                assert global_norm_and_finite(layout).norm.item() == pytest.approx(exact, rel=bound, abs=0.0)


def test_s10_divisor_is_scale_times_excess() -> None:
    norm, scale = torch.tensor(4.0, dtype=torch.float64), torch.tensor(8.0)
    assert unscale_and_clip_divisor(norm, None, clip.gradient_clip(ClipLimits())) is None
    cases = ((scale, None, 0.0), (None, 2.0, 0.0), (scale, 2.0, 0.0), (scale, 16.0, 0.0), (scale, 2.0, 0.5))
    found = [
        unscale_and_clip_divisor(norm, by, clip.gradient_clip(ClipLimits(limit, eps=eps))) for by, limit, eps in cases
    ]
    assert [None if by is None else by.item() for by in found] == [8.0, 2.0, 16.0, 8.0, 18.0]


# --- the whole step against the rules, computed in float64


class Dot(nn.Module):
    """Its gradient with respect to `w` is the batch, whatever its size."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).sum()


def stepped(make: Callable[[Any], Any], value: torch.Tensor, scale: float, clip: float | None) -> tuple[Any, Any]:
    """The step with rate 1 and a gradient of `value`: (what was added to the parameters, negated; the result)."""
    model = Dot(value.numel())
    scaler = polyamp.LossScaler.static(scale, on_stuck="ignore")
    recipe = polyamp.Recipe(optimizer=make(model.parameters()), scaler=scaler, clip_norm=clip)
    state, result = polyamp.train_step(lambda m, b: m(b[0]), recipe)(polyamp.init(model, recipe), (value,))
    return -state.model.w.detach(), result


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "fused": lambda parameters: polyamp.sgd(1.0),
    "plain": lambda parameters: torch.optim.SGD(parameters, 1.0),
    "foreach": lambda parameters: torch.optim.SGD(parameters, 1.0, foreach=True),
}
CLIPS: list[tuple[str, float, float, float | None]] = [
    ("nothing to do", 0.25, 1.0, None),
    ("unscale", 0.25, 2.0**15, None),
    ("clip", 8.0, 1.0, 1.0),
    ("unscale and clip", 8.0, 2.0**15, 1.0),
    ("unscale, below the limit", 0.25, 2.0**15, 1.0),
    ("an odd scale", 8.0, 1000.0, 1.0),
    ("squares overflow", 1e25, 1.0, 1.0),
    ("squares overflow, scaled", 1e25, 2.0**24, 1.0),
    ("squares vanish", 1e-30, 2.0**15, 1e-35),
    ("subnormal gradients", 1e-42, 2.0**15, 1.0),
    ("large gradients", 2.9e38, 1.0, 1.0),
    ("a scale of 2^127", 0.25, 2.0**127, 0.25),
]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("size", "scale", "clip"), [row[1:] for row in CLIPS], ids=[row[0] for row in CLIPS])
def test_s10_unscale_and_clip_follow_the_rules(
    way: str, kind: str, size: float, scale: float, clip: float | None
) -> None:
    value = torch.tensor([1.0, -0.5, 0.0, 0.25]) * size
    unscaled = ((value * scale).double() / scale).float().double()
    norm = unscaled.norm()
    wanted = unscaled if clip is None else unscaled * (clip / max(norm.item(), clip))
    moved, result = stepped(OPTIMIZERS[kind], value, scale, clip)
    if not torch.isfinite(value * scale).all():
        assert bool(result.skipped)
        assert not moved.any()
        return
    assert not bool(result.skipped)
    assert result.grad_norm.item() == pytest.approx(norm.float().item(), rel=1e-6, abs=1e-45)
    torch.testing.assert_close(moved.double(), wanted, rtol=3e-7, atol=1e-45)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("size", "clip"), [(3e38, 1.0), (1e36, 1e-4), (3e38, 1e-30), (3.0, 1e-45)])
def test_s10_a_clip_beyond_the_range_of_one_factor(way: str, kind: str, size: float, clip: float) -> None:
    """The divisor does not fit into float32. The CPU divides in two steps; elsewhere the step is skipped."""
    value = torch.tensor([1.0, -0.5, 0.0, 0.25]) * size
    moved, result = stepped(OPTIMIZERS[kind], value, 1.0, clip)
    if way == "blind":
        assert bool(result.skipped)
        assert not moved.any()
        return
    wanted = value.double() * (clip / value.double().norm())
    assert not bool(result.skipped)
    torch.testing.assert_close(moved.double(), wanted, rtol=3e-7, atol=1.5e-45)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.usefixtures("way")
def test_s10_trap_overflow_by_unscaling_skips(kind: str) -> None:
    """The scaled gradient is finite and the gradient is not. torch's scaler looks before it unscales: inf."""

    def overflowing(model: Any, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = model(torch.full((4,), 1e12)) * 1e30
        return loss

    plain = Dot()
    native = torch.optim.SGD(plain.parameters(), 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-14)
    scaler.scale(overflowing(plain, None)).backward()
    assert plain.w.grad is not None
    assert plain.w.grad.isfinite().all()
    scaler.step(native)
    assert plain.w.isinf().all(), "what torch does by itself"
    model = Dot()
    scale = polyamp.LossScaler.static(2.0**-14, on_stuck="ignore")
    recipe = polyamp.Recipe(optimizer=OPTIMIZERS[kind](model.parameters()), scaler=scale)
    _, result = polyamp.train_step(overflowing, recipe)(polyamp.init(model, recipe), (torch.ones(1),))
    assert bool(result.skipped)
    assert not model.w.any()


def test_s10_without_a_check_what_is_not_finite_is_applied(way: str) -> None:
    """S19: `off` gives what plain code gives."""
    model = Dot(2)
    recipe = polyamp.Recipe(optimizer=polyamp.sgd(1.0), clip_norm=1.0)
    state = polyamp.init(model, recipe)
    polyamp.train_step(lambda m, b: m(b[0]), recipe)(state, (torch.tensor([INF, 1.0]),))
    plain = torch.tensor([INF, 1.0]) * (1.0 / INF)
    torch.testing.assert_close(-model.w.detach(), plain, equal_nan=True)


# --- who looks


class Reads(TorchDispatchMode):
    """Counts values that are read on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def item(gain: float, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(4, 6)).astype(np.float32), rng.normal(size=(4, 2)).astype(np.float32)
    return {"x": x, "y": y, "gain": np.full((4, 2), gain, np.float32)}


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch["x"]) * batch["gain"], batch["y"])


RATE = polyamp.schedules.warmup_cosine(0.1, warmup_steps=2, total_steps=20, start=0.01)
SPECS: dict[str, Any] = {
    "sgd": polyamp.sgd(RATE),
    "momentum": polyamp.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": polyamp.adam(0.01),
    "adamw": polyamp.adamw(RATE),
    "rmsprop": polyamp.rmsprop(0.01, momentum=0.5, centered=True, weight_decay=0.1),
    "adagrad": polyamp.adagrad(RATE, lr_decay=0.1, initial_accumulator_value=0.1),
    "lion": polyamp.lion(0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", SPECS)
def test_s10_off_the_cpu_nothing_is_read(name: str, clip: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No host synchronisation with fused or polyamp-managed optimizers, skips, schedules and BatchNorm included."""
    refuse_to_look(monkeypatch)
    scaler = polyamp.LossScaler(init_scale=16.0, growth_interval=2)
    recipe = polyamp.Recipe(policy="mixed_bfloat16", optimizer=SPECS[name], scaler=scaler, clip_norm=clip)
    state = polyamp.init(network(), recipe)
    run = polyamp.train_step(loss_fn, recipe)
    with Reads() as reads:
        for seed, gain in enumerate((INF, 1.0, 1.0, NAN, 1.0)):
            run(state, item(gain, seed))
    assert reads.count == 0
    assert int(state.step) == 3


@pytest.mark.parametrize(
    ("name", "compiled", "scale"),
    [
        *((name, False, scale) for name in ("adamw", "sgd", "rmsprop") for scale in (1.0, 1024.0)),
        *((name, True, 1024.0) for name in ("adamw", "rmsprop")),
    ],
)
def test_s11_a_clip_by_value_is_torchs(name: str, compiled: bool, scale: float, way: str) -> None:
    """With fused kernels, formulas and in a compiled step: the loop with `clip_grad_value_` by hand."""
    optimizer = {"adamw": polyamp.adamw(0.01), "sgd": polyamp.sgd(0.5), "rmsprop": polyamp.rmsprop(0.01)}[name]
    recipe = polyamp.Recipe(optimizer=optimizer, clip_value=0.02, scaler=polyamp.LossScaler.static(scale))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    twin = copy.deepcopy(model)
    by_hand = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop}[name]
    own = by_hand(twin.parameters(), optimizer.learning_rate)  # type: ignore[arg-type]  # a number
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(loss_fn, recipe, compile={"backend": "eager"} if compiled else False)
    for seed in range(3):
        state, _ = step(state, item(1.0, seed))
        own.zero_grad()
        loss_fn(twin, {key: torch.from_numpy(value) for key, value in item(1.0, seed).items()}).backward()
        grads = [p.grad for p in twin.parameters() if p.grad is not None]
        assert max(float(grad.abs().max()) for grad in grads) > 0.02
        nn.utils.clip_grad_value_(twin.parameters(), 0.02)
        own.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("groups", [(), (polyamp.Group("bias", clip_value=3.0),)])
def test_s11_another_rule_of_clipping_is_one_function(
    groups: Any, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rules.clip.gradient_clip` alone decides: here every gradient is halved, which makes new tensors."""
    halving = clip.GradientClip(transformation=lambda grad, xp: grad * xp.asarray(0.5, grad))
    for module in (clip, group_members):
        monkeypatch.setattr(module, "gradient_clip", lambda limits: halving)
    recipe = polyamp.Recipe(optimizer=polyamp.sgd(1.0, groups=groups), clip_value=2.0)
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    twin = copy.deepcopy(model)
    loss_fn(twin, {key: torch.from_numpy(value) for key, value in item(1.0, 0).items()}).backward()
    step = polyamp.train_step(loss_fn, recipe, compile={"backend": "eager"} if compiled else False)
    step(polyamp.init(model, recipe), item(1.0, 0))
    for p, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert other.grad is not None
        torch.testing.assert_close(p, other - 0.5 * other.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_s11_trap_torch_adds_to_the_norm(compiled: bool, way: str) -> None:
    """At a norm of 0.01 torch's `clip_grad_norm_` is 1e-4 below the quotient; `clip_eps=1e-6` is torch's."""
    theirs = nn.Parameter(torch.zeros(2))
    theirs.grad = torch.tensor([0.006, 0.008])
    nn.utils.clip_grad_norm_([theirs], 0.005)
    moved = {}
    for eps in (0.0, 1e-6):
        recipe = polyamp.Recipe(optimizer=polyamp.sgd(1.0), clip_norm=0.005, clip_eps=eps)
        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        step = polyamp.train_step(lambda m, x: m(x).sum(), recipe, compile={"backend": "eager"} if compiled else False)
        step(polyamp.init(model, recipe), np.array([[0.006, 0.008]], np.float32))
        moved[eps] = -model.weight.detach()[0]
    torch.testing.assert_close(moved[1e-6], theirs.grad, rtol=2e-7, atol=0.0)
    torch.testing.assert_close(moved[0.0] / theirs.grad, torch.full((2,), 1.0001), rtol=2e-6, atol=0.0)


def test_s10_off_the_cpu_a_warm_compiled_step_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = "mixed_float16"  # which scales: what float32 reads it reads too
    refuse_to_look(monkeypatch)
    compiler = {"backend": "eager"}
    for number in (0.1, 0.2):  # what differs between two graphs of one function torch makes an input, read at each step
        other = polyamp.Recipe(policy=policy, optimizer=polyamp.adamw(0.1, eps=number), clip_norm=number)
        polyamp.train_step(loss_fn, other, compile=compiler)(polyamp.init(network(), other), item(1.0, 0))
    recipe = polyamp.Recipe(policy=policy, optimizer=SPECS["adamw"], clip_norm=0.5)
    state, run = polyamp.init(network(), recipe), polyamp.train_step(loss_fn, recipe, compile=compiler)
    run(state, item(1.0, 0))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:  # compilers refuse a mode
        for seed, gain in enumerate((1.0, INF, 1.0)):
            run(state, item(gain, seed))
    reads = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"}
    assert [event.name for event in seen.events() if event.name in reads] == []
    assert any(event.name == "aten::linear" for event in seen.events())
    assert int(state.step) == 3


@pytest.mark.parametrize(("fused", "reads_a_step"), [(True, 0), (False, 1)])
def test_s10_native_optimizers_without_fused_kernels_read_the_flag_once(
    fused: bool, reads_a_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_look(monkeypatch)
    model = network()
    native = torch.optim.SGD(model.parameters(), 0.1, fused=fused)
    recipe = polyamp.Recipe(optimizer=native, scaler=polyamp.LossScaler.static(4.0), clip_norm=1.0)
    run = polyamp.train_step(loss_fn, recipe)
    state = polyamp.init(model, recipe)
    with Reads() as reads:
        for seed in range(3):
            run(state, item(1.0, seed))
    assert reads.count == 3 * reads_a_step


class Gapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 12)[:, ::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


@pytest.mark.parametrize(
    ("make", "policy", "optimizer", "reads"),
    [
        (network, "float32", lambda p: torch.optim.AdamW(p, 0.1, fused=True), [1, 0, 0]),  # until its state is there
        (Gapped, "float32", lambda _: polyamp.sgd(0.1), [1, 1, 1]),
        (lambda: network().to(torch.bfloat16), "bfloat16", lambda _: polyamp.sgd(0.1), [1, 1, 1]),  # fused on CUDA
    ],
    ids=["native", "gaps", "16 bits"],
)
def test_s10_what_cannot_be_told_on_the_device_reads_the_flag_once(
    make: Any, policy: str, optimizer: Any, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_look(monkeypatch)
    model = make()
    recipe = polyamp.Recipe(
        policy=policy, optimizer=optimizer(model.parameters()), scaler=polyamp.LossScaler.static(4.0)
    )
    run = polyamp.train_step(loss_fn, recipe)
    state = polyamp.init(model, recipe)
    seen = []
    for seed in range(3):
        with Reads() as counted:
            run(state, item(1.0, seed))
        seen.append(counted.count)
    assert seen == reads


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", SPECS)
def test_s10_looking_and_not_looking_agree(name: str, clip: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same scales and flags, and the same parameters to float32 rounding; S12 holds bit for bit on both ways."""
    exports: list[dict[str, Any]] = []
    traces: list[list[tuple[float, bool, int]]] = []
    for blind in (False, True):
        if blind:
            refuse_to_look(monkeypatch)
        scaler = polyamp.LossScaler(init_scale=16.0, growth_interval=2)
        recipe = polyamp.Recipe(optimizer=SPECS[name], scaler=scaler, clip_norm=clip)
        model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
        torch.manual_seed(0)
        for p in model.parameters():
            nn.init.normal_(p)
        state = polyamp.init(model, recipe)
        run = polyamp.train_step(loss_fn, recipe)
        trace = []
        for seed, gain in enumerate((INF, 1.0, 1.0, NAN, 1.0, 1.0)):
            before = state.backend.export_state(state)
            state, result = run(state, item(gain, seed))
            trace.append((result.scale.item(), bool(result.skipped), int(result.step)))
            if gain != 1.0:
                after = state.backend.export_state(state)
                same = [key for key in before if before[key].tobytes() == after[key].tobytes()]
                assert {key for key in before if not key.startswith("loss_scale/")} <= set(same)
        traces.append(trace)
        exports.append(state.backend.export_state(state))
    assert traces[0] == traces[1]
    assert exports[0].keys() == exports[1].keys()
    for key, value in exports[0].items():
        np.testing.assert_allclose(exports[1][key], value, rtol=1e-4, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("name", SPECS)
def test_s10_formulas_run_in_float32_over_16_bit_parameters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for blind in (False, True):
        if blind:
            refuse_to_look(monkeypatch)
        torch.manual_seed(0)
        model = nn.Linear(6, 2).bfloat16()
        recipe = polyamp.Recipe(policy="bf16-true", optimizer=SPECS[name])
        run = polyamp.train_step(loss_fn, recipe)
        state = polyamp.init(model, recipe)
        for seed in range(3):
            run(state, item(1.0, seed))
        assert model.weight.dtype == torch.bfloat16
        weights.append(model.weight.detach().float())
    torch.testing.assert_close(*weights, rtol=2e-2, atol=2e-2)  # bfloat16 has 8 bits
