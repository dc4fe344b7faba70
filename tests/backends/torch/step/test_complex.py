"""S1 on complex parameters in torch: steps equal loops by hand with `torch.optim` and `clip_grad_norm_`."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import polyamp
from polyamp.errors import GradientError, LossError, LossScaleStuckError, ModelError, UnsupportedError
from tests.backends.torch.step.test_gradients import refuse_to_look

Batch = dict[str, torch.Tensor]
CHANNELS, MODES, LENGTH, ROWS = 3, 5, 16, 6
COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}


class Spectral(nn.Module):
    """A Fourier layer, as of a Fourier neural operator, beside a skip connection; real and complex parameters."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.dtype = dtype
        self.lift = nn.Linear(1, CHANNELS, dtype=dtype)
        values = torch.randn(CHANNELS, CHANNELS, MODES, dtype=COMPLEX[dtype], generator=generator)
        self.weights = nn.Parameter(0.3 * values)
        self.phase = nn.Parameter(torch.ones(MODES, dtype=COMPLEX[dtype]))
        self.head = nn.Linear(CHANNELS, 1, dtype=dtype)
        for p in (self.lift, self.head):
            nn.init.uniform_(p.weight, -1.0, 1.0, generator=generator)
            nn.init.zeros_(p.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.lift(x[..., None]).transpose(1, 2)
        modes = torch.fft.rfft(hidden.to(self.dtype))[..., :MODES] * self.phase.conj()
        mixed = torch.fft.irfft(torch.einsum("bix,iox->box", modes, self.weights), n=LENGTH)
        found: torch.Tensor = self.head(torch.tanh(mixed + hidden).to(hidden.dtype).transpose(1, 2))[..., 0]
        return found


def loss_fn(model: Any, batch: Batch) -> torch.Tensor:
    return functional.mse_loss(model(batch["x"]).to(batch["y"].dtype), batch["y"])


def batches(number: int, dtype: torch.dtype = torch.float32) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    shape = (ROWS, LENGTH)
    return [{name: torch.randn(shape, dtype=dtype, generator=generator) for name in "xy"} for _ in range(number)]


def by_hand(model: nn.Module, optimizer: Any, steps: Sequence[Batch], clip: float) -> list[float]:
    norms = []
    for batch in steps:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad = p.grad.resolve_conj()  # torch's clip fails on one that is only marked as a conjugate
        norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        for p in model.parameters():
            assert p.grad is not None
            p.grad *= clip / norm.clamp(min=clip)  # clip_grad_norm_ divides by the norm + 1e-6
        norms.append(float(norm))
        optimizer.step()
    return norms


def trained(model: nn.Module, recipe: polyamp.Recipe, steps: Sequence[Batch], **options: Any) -> tuple[Any, list[Any]]:
    state, step = polyamp.init(model, recipe), polyamp.train_step(loss_fn, recipe, **options)
    return state, [step(state, batch)[1] for batch in steps]


def apart(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.fixture(params=["reading is free", "reading waits"])
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step as on the CPU, and on the path that accelerators take, which selects by the flag on the device."""
    if request.param == "reading waits":
        refuse_to_look(monkeypatch)


Pair = tuple[Any, Callable[[Any], torch.optim.Optimizer]]
SPECS: dict[str, Pair] = {
    "sgd": (polyamp.sgd(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "nesterov": (
        polyamp.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    "adam": (polyamp.adam(0.01, weight_decay=0.01), lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.01)),
    "adamw": (polyamp.adamw(0.01, weight_decay=0.1), lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1)),
    "rmsprop": (
        polyamp.rmsprop(0.01, eps=1e-3, momentum=0.9, centered=True, weight_decay=0.01),
        lambda p: torch.optim.RMSprop(p, 0.01, eps=1e-3, momentum=0.9, centered=True, weight_decay=0.01),
    ),
    "adagrad": (
        polyamp.adagrad(0.05, lr_decay=0.1, weight_decay=0.01, initial_accumulator_value=0.1),
        lambda p: torch.optim.Adagrad(p, 0.05, lr_decay=0.1, weight_decay=0.01, initial_accumulator_value=0.1),
    ),
    "nadam": (polyamp.nadam(0.01, weight_decay=0.01), lambda p: torch.optim.NAdam(p, 0.01, weight_decay=0.01)),
}


@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize(
    ("name", "policy", "dtype", "near"),
    [
        *((name, "float32", torch.float32, 2e-6) for name in SPECS),
        *((name, "float64", torch.float64, 1e-14) for name in SPECS if name != "nadam"),  # torch's product is float32
    ],
)
def test_s21_every_spec_equals_torch_optim(name: str, policy: str, dtype: torch.dtype, near: float) -> None:
    spec, native = SPECS[name]
    mine, theirs = Spectral(dtype), Spectral(dtype)
    start = copy.deepcopy(mine)
    recipe = polyamp.Recipe(policy=policy, optimizer=spec, clip_norm=0.2)
    state, results = trained(mine, recipe, batches(12, dtype))
    optimizer = native(theirs.parameters())
    norms = by_hand(theirs, optimizer, batches(12, dtype), 0.2)
    assert apart(mine, theirs) < near
    assert apart(mine, start) > 1e-2
    assert max(norms) > 0.2
    assert [float(result.grad_norm) for result in results] == pytest.approx(norms, rel=1e-5)
    assert mine.weights.dtype == COMPLEX[dtype]
    assert mine.weights.imag.ne(start.weights.imag).all()
    for slot, value in optimizer.state[theirs.weights].items():
        if isinstance(value, torch.Tensor) and slot != "step":
            found = state.optimizer.state[mine.weights][slot]
            assert (found.dtype, found.shape) == (value.dtype, value.shape)
            assert (found - value).abs().max() < near * value.abs().max().clamp(min=1.0)


def test_s21_lion_takes_the_sign_of_each_part() -> None:
    mine, real = Spectral(), Spectral()
    trained(mine, polyamp.Recipe(policy="float32", optimizer=polyamp.lion(0.01, weight_decay=0.1)), batches(8))
    moments = [torch.zeros_like(torch.view_as_real(p) if p.is_complex() else p) for p in real.parameters()]
    for batch in batches(8):
        real.zero_grad()
        loss_fn(real, batch).backward()
        with torch.no_grad():
            for p, moment in zip(real.parameters(), moments, strict=True):
                assert p.grad is not None
                value, grad = p, p.grad.resolve_conj()
                if p.is_complex():
                    value, grad = torch.view_as_real(p), torch.view_as_real(grad)
                direction = (0.9 * moment + 0.1 * grad).sign()
                value.mul_(1.0 - 0.01 * 0.1).sub_(0.01 * direction)
                moment.mul_(0.99).add_(0.01 * grad)
    assert apart(mine, real) < 1e-6


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adamax", "NAdam", "RAdam", "Adadelta", "ASGD", "Rprop", "RMSprop"])
def test_s21_torchs_own_optimizers_run_as_by_hand(name: str) -> None:
    """The phase is used as its conjugate, which leaves a gradient that is only marked as one."""
    mine, theirs = Spectral(), Spectral()
    kind = getattr(torch.optim, name)
    recipe = polyamp.Recipe(policy="float32", optimizer=kind(mine.parameters(), lr=0.01))
    trained(mine, recipe, batches(10))
    by_hand(theirs, kind(theirs.parameters(), lr=0.01), batches(10), 1e9)
    assert equal(mine, theirs)


# The flag, the norm, loss scaling.


class Parts(nn.Module):
    """Gives both parts of one complex parameter, and one real one."""

    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.tensor([1.0 + 2.0j, -3.0 + 0.5j]))
        self.w = nn.Parameter(torch.tensor([1.0]))

    def forward(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.z.real, self.z.imag, self.w


def gained(model: Any, gains: torch.Tensor) -> torch.Tensor:
    real, imag, w = model()
    return gains[0, 0] * real.sum() + gains[0, 1] * imag.sum() + w.sum()


@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize("optimizer", [polyamp.adamw(0.1), polyamp.lion(0.1), "native"])
@pytest.mark.parametrize("gains", [(1.0, float("inf")), (float("inf"), 1.0), (float("nan"), 1.0), (1.0, 3e38)])
def test_s10_one_part_that_is_not_finite_skips_the_step(gains: tuple[float, float], optimizer: Any) -> None:
    """The last is finite until it is multiplied by the scale."""
    model = Parts()
    made = torch.optim.Adam(model.parameters(), 0.1) if optimizer == "native" else optimizer
    recipe = polyamp.Recipe(policy="mixed_float16", optimizer=made, scaler=polyamp.LossScaler(init_scale=64.0))
    state, step = polyamp.init(model, recipe), polyamp.train_step(gained, recipe)
    step(state, torch.ones(1, 2))
    before = state.export()
    _, result = step(state, torch.tensor([gains]))
    after = state.export()
    assert (bool(result.skipped), float(result.scale)) == (True, 32.0)
    assert [name for name in before if name[:4] != "loss" and before[name].tobytes() != after[name].tobytes()] == []
    _, result = step(state, torch.ones(1, 2))
    assert (bool(result.skipped), int(result.step)) == (False, 2)


def test_s10_a_magnitude_beyond_float32_with_finite_parts_is_finite() -> None:
    model = Parts()
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(1e-38), clip_norm=None)
    state, step = polyamp.init(model, recipe), polyamp.train_step(gained, recipe)
    _, result = step(state, torch.full((1, 2), 3e38))
    assert not result.skipped
    assert torch.allclose(model.z.detach(), torch.tensor([-2.0 - 1.0j, -6.0 - 2.5j]))


def test_s17_a_stuck_scale_names_the_complex_parameter() -> None:
    scaler = polyamp.LossScaler(init_scale=1.0, min_scale=1.0, patience=2)
    recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.sgd(0.1), scaler=scaler)
    state, step = polyamp.init(Parts(), recipe), polyamp.train_step(gained, recipe)
    step(state, torch.tensor([[1.0, float("inf")]]))
    with pytest.raises(LossScaleStuckError, match=r"\bz\b"):
        step(state, torch.tensor([[1.0, float("inf")]]))


@pytest.mark.parametrize("mode", ["autocast", "cast"])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_s02_both_modes_leave_complex_parameters_as_they_are(policy: str, mode: Any) -> None:
    seen: list[tuple[torch.dtype, torch.dtype]] = []

    def watched(model: Any, batch: Batch) -> torch.Tensor:
        linear = functional.linear(batch["x"], torch.ones(2, LENGTH))
        seen.append((model.weights.dtype, linear.dtype if mode == "autocast" else model.lift.weight.dtype))
        return loss_fn(model, batch)

    mine, exact = Spectral(), Spectral()
    recipe = polyamp.Recipe(policy=polyamp.Policy(policy, mode=mode), optimizer=polyamp.adam(0.01))
    state, step = polyamp.init(mine, recipe), polyamp.train_step(watched, recipe)
    results = [step(state, batch)[1] for batch in batches(10)]
    trained(exact, polyamp.Recipe(policy="float32", optimizer=polyamp.adam(0.01)), batches(10))
    narrow = torch.float16 if policy == "mixed_float16" else torch.bfloat16
    assert set(seen) == {(torch.complex64, narrow)}
    assert not any(result.skipped for result in results)
    assert 0.0 < apart(mine, exact) < 0.05


# Windows, halves, checkpoints.


@pytest.mark.parametrize("optimizer", [polyamp.sgd(0.1, momentum=0.9), polyamp.adamw(0.01)])
@pytest.mark.parametrize("micro", [1, 2, 3])
def test_s08_a_window_is_one_batch(micro: int, optimizer: Any) -> None:
    mine, whole = Spectral(), Spectral()
    scaler = polyamp.LossScaler(init_scale=128.0)
    made = polyamp.Recipe(policy="float32", optimizer=optimizer, clip_norm=0.2, scaler=scaler)
    trained(mine, made.replace(accumulate_steps=micro), batches(6))
    trained(whole, made, batches(6))
    assert apart(mine, whole) < 2e-6


def test_s07_value_and_grad_gives_unscaled_complex_gradients() -> None:
    model, plain = Spectral(), Spectral()
    scaler = polyamp.LossScaler(init_scale=1024.0)
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adam(0.01), scaler=scaler, clip_norm=0.2)
    state = polyamp.init(model, recipe)
    (batch,) = batches(1)
    loss, gradients = polyamp.value_and_grad(loss_fn)(state, batch)
    expected = loss_fn(plain, batch)
    expected.backward()
    assert float(loss) == pytest.approx(float(expected.detach()))
    for name, p in state.parameters.items():
        grad = plain.get_parameter(name.replace("/", ".")).grad
        value = gradients.values[name]
        assert grad is not None
        assert (value.dtype, value.shape, value.is_conj()) == (p.dtype, p.shape, False)
        assert torch.allclose(value, grad, atol=1e-7)
    polyamp.apply_gradients(state, gradients)
    whole = Spectral()
    trained(whole, recipe, [batch])
    assert apart(model, whole) < 1e-7


def test_gradients_of_the_users_own_may_be_marked_as_conjugates_and_are_kept() -> None:
    ends = []
    for marked in (True, False):
        model = Parts()
        recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adam(0.1), clip_norm=0.5)
        state = polyamp.init(model, recipe)
        _, gradients = polyamp.value_and_grad(gained)(state, torch.ones(1, 2))
        value = torch.tensor([1.0 + 2.0j, 3.0 - 4.0j]).conj()
        gradients.values["z"] = value if marked else value.resolve_conj()
        polyamp.apply_gradients(state, gradients)
        assert value.tolist() == [1.0 - 2.0j, 3.0 + 4.0j]
        ends.append(model)
    assert equal(*ends)


def test_a_complex_gradient_of_a_real_parameter_is_refused() -> None:
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
    state = polyamp.init(Parts(), recipe)
    _, gradients = polyamp.value_and_grad(gained)(state, torch.ones(1, 2))
    gradients.values["w"] = torch.tensor([1.0 + 1.0j])
    with pytest.raises(GradientError, match="'w' must be real"):
        polyamp.apply_gradients(state, gradients)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(("policy", "dtype"), [("mixed_float16", torch.float32), ("float64", torch.float64)])
def test_s22_saved_and_restored_training_goes_on_bit_for_bit(
    tmp_path: Path, policy: str, dtype: torch.dtype, native: bool, sharded: bool
) -> None:
    def made(model: nn.Module) -> polyamp.Recipe:
        optimizer: Any = torch.optim.NAdam(model.parameters(), 0.01) if native else polyamp.adamw(0.01)
        return polyamp.Recipe(policy=policy, optimizer=optimizer, clip_norm=0.5)

    steps = batches(6, dtype)
    straight, first, second = Spectral(dtype), Spectral(dtype), Spectral(dtype)
    trained(straight, made(straight), steps)
    state, _ = trained(first, made(first), steps[:3])
    polyamp.save(state, tmp_path / "state", sharded=sharded)
    recipe = made(second)
    with torch.no_grad():
        second.weights.zero_()
    state = polyamp.restore(polyamp.init(second, recipe), tmp_path / "state")
    assert equal(first, second)
    step = polyamp.train_step(loss_fn, recipe)
    for batch in steps[3:]:
        step(state, batch)
    assert equal(straight, second)


def test_copies_of_a_state_train_by_themselves() -> None:
    model = Spectral()
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adamw(0.01))
    state, _ = trained(model, recipe, batches(2))
    before, step = copy.deepcopy(model), polyamp.train_step(loss_fn, recipe)
    copies = [copy.deepcopy(state), pickle.loads(pickle.dumps(state))]  # this test's own bytes
    for each in copies:
        step(each, batches(3)[2])
    assert equal(model, before)
    step(state, batches(3)[2])
    assert not equal(model, before)
    assert all(equal(each.model, model) for each in copies)


def test_memory_that_was_replaced_is_what_is_updated() -> None:
    """`p.data = ...` and a loaded optimizer state leave the views of before behind."""
    ends = []
    for moved in (False, True):
        model = Spectral()
        recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adamw(0.01))
        state, step = polyamp.init(model, recipe), polyamp.train_step(loss_fn, recipe)
        for batch in batches(3):
            step(state, batch)
            if moved:
                model.weights.data = model.weights.detach().clone()
                state.optimizer.load_state_dict(copy.deepcopy(state.optimizer.state_dict()))
        ends.append(model)
    assert equal(*ends)


class Layouts(nn.Module):
    """Complex parameters with gaps in memory, transposed, of no axis and without elements."""

    def __init__(self, *, gaps: bool) -> None:
        super().__init__()
        values = torch.randn(4, 6, dtype=torch.complex64, generator=torch.Generator().manual_seed(3))
        self.gaps = nn.Parameter(values[:, ::2] if gaps else values[:, ::2].contiguous())
        self.turned = nn.Parameter(values.clone().t())
        self.scalar = nn.Parameter(torch.tensor(1.0 + 1.0j))
        self.empty = nn.Parameter(torch.zeros(0, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = x.to(torch.complex64) @ self.turned @ self.gaps.conj() * self.scalar
        return found.abs() + self.empty.abs().sum()


@pytest.mark.parametrize("spec", ["nesterov", "adamw", "rmsprop"])
@pytest.mark.parametrize("gaps", [False, True])
def test_any_layout_trains_as_torch_optim_does(gaps: bool, spec: str) -> None:
    def loss(model: Any, batch: Batch) -> torch.Tensor:
        return (model(batch["x"][:, :6]) * 0.01).square().mean()

    mine, theirs = Layouts(gaps=gaps), Layouts(gaps=gaps)
    recipe = polyamp.Recipe(policy="float32", optimizer=SPECS[spec][0])
    state, step = polyamp.init(mine, recipe), polyamp.train_step(loss, recipe)
    optimizer = SPECS[spec][1](theirs.parameters())
    for batch in batches(10):
        step(state, batch)
        optimizer.zero_grad()
        loss(theirs, batch).backward()
        for p in theirs.parameters():
            assert p.grad is not None
            p.grad = p.grad.resolve_conj()
        optimizer.step()
    ends = zip(mine.parameters(), theirs.parameters(), strict=True)
    assert max(float((a.detach() - b.detach()).abs().amax()) for a, b in ends if a.numel()) < 2e-6
    assert mine.gaps.stride() == theirs.gaps.stride()


def test_a_state_goes_on_with_a_changed_model() -> None:
    model, straight = Spectral(), Spectral()
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adamw(0.01))
    step = polyamp.train_step(loss_fn, recipe)
    state, _ = trained(model, recipe, batches(3))
    trained(straight, recipe, batches(5))
    state = polyamp.refresh(state)
    for batch in batches(5)[3:]:
        step(state, batch)
    assert equal(model, straight)
    model.weights.requires_grad_(False)
    before = model.weights.detach().clone()
    state = polyamp.refresh(state)
    step(state, batches(1)[0])
    assert torch.equal(model.weights, before)


# Groups, penalties, compiled steps.


def test_s27_kinds_are_those_of_the_complex_parameter() -> None:
    """The phase is a vector, though its parts have two axes."""
    mine, theirs = Spectral(), Spectral()
    spec = polyamp.adamw(0.01, weight_decay=1.0, groups=polyamp.no_decay("vector"))
    trained(mine, polyamp.Recipe(policy="float32", optimizer=spec), batches(5))
    wide = [p for p in theirs.parameters() if p.dim() > 1]
    thin = [p for p in theirs.parameters() if p.dim() < 2]
    assert any(p is theirs.phase for p in thin)
    options = [{"params": wide}, {"params": thin, "weight_decay": 0.0}]
    by_hand(theirs, torch.optim.AdamW(options, 0.01, weight_decay=1.0), batches(5), 1e9)
    assert apart(mine, theirs) < 1e-6


def test_s23_a_complex_parameter_that_is_not_used_stays() -> None:
    model = Parts()
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adamw(0.1, weight_decay=1.0))
    state, step = polyamp.init(model, recipe), polyamp.train_step(lambda m, b: m()[2].sum() * b.sum(), recipe)
    step(state, torch.ones(1))
    assert model.z.tolist() == [1.0 + 2.0j, -3.0 + 0.5j]
    assert model.w.tolist() != [1.0]


def test_a_penalty_counts_both_parts() -> None:
    model = Parts()
    assert polyamp.losses.sum_of_squares(polyamp.parameters(model)).item() == pytest.approx(5.0 + 9.25 + 1.0)
    with pytest.raises(LossError, match=r"take real tensors\. Received: complex64"):
        polyamp.losses.mean_squared_error(model.z, torch.zeros(2))


@pytest.mark.parametrize("name", ["nesterov", "native"])
def test_compiled_steps_equal_eager_ones(name: str) -> None:
    ends = []
    for options in ({"compile": {"backend": "aot_eager"}}, {}):
        model = Spectral()
        optimizer: Any = torch.optim.RAdam(model.parameters(), 0.01) if name == "native" else SPECS[name][0]
        recipe = polyamp.Recipe(policy="float32", optimizer=optimizer, clip_norm=0.2, accumulate_steps=2)
        state, _ = trained(model, recipe, batches(4), **options)
        ends.append(state.model)
    assert apart(*ends) < 1e-6


def test_compiled_steps_skip_for_one_part() -> None:
    model = Parts()
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adam(0.1), scaler=polyamp.LossScaler(init_scale=8.0))
    state, step = polyamp.init(model, recipe), polyamp.train_step(gained, recipe, compile={"backend": "aot_eager"})
    _, result = step(state, torch.tensor([[1.0, float("inf")]]))
    assert (bool(result.skipped), model.z.tolist()) == (True, [1.0 + 2.0j, -3.0 + 0.5j])
    _, result = step(state, torch.ones(1, 2))
    assert (bool(result.skipped), int(result.step)) == (False, 1)


# What is refused.


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    ("dtype", "policy", "message"),
    [
        (torch.complex32, "float16", "has dtype complex32, which polyamp cannot train"),
        (torch.complex64, "float16", "whose parts are float32, but the policy stores parameters as float16. Use a pol"),
        (torch.complex128, "mixed_bfloat16", "parts are float64, .* as float32. Convert it to complex64 first, or use"),
        (torch.complex64, "float64", "parts are float32, .* as float64. Convert it to complex128 first"),
    ],
)
def test_s20_other_complex_dtypes_are_refused(dtype: torch.dtype, policy: str, message: str) -> None:
    model = nn.Module()
    model.register_parameter("z", nn.Parameter(torch.zeros(2, dtype=dtype)))
    with pytest.raises(ModelError, match=message):
        polyamp.init(model, polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.Adafactor(p), "Adafactor does not train complex parameters. Received: parameter 'z'"),
        (lambda p: torch.optim.Adam(p, fused=True), r"Adam\(fused=True\) does not train complex .* Use fused=False"),
    ],
)
def test_s20_optimizers_without_complex_numbers_are_refused(make: Any, message: str) -> None:
    model = Parts()
    with pytest.raises(UnsupportedError, match=message):
        polyamp.init(model, polyamp.Recipe(policy="float32", optimizer=make(model.parameters())))


def test_s20_comparing_complex_parameters_is_refused() -> None:
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
    with pytest.raises(
        UnsupportedError, match=r"complex parameter \(complex64\), which is trained \(S1\), and not comp"
    ):
        polyamp.compare(Spectral(), Spectral(), batches(1)[0], loss_fn, recipe, 1)


def test_s20_the_loss_stays_real() -> None:
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
    state, step = polyamp.init(Parts(), recipe), polyamp.train_step(lambda m, b: m.z.sum() * b.sum(), recipe)
    with pytest.raises(LossError, match=r"floating loss\. Received dtype: complex64"):
        step(state, torch.ones(1))


def test_a_model_of_real_parameters_has_nothing_of_this() -> None:
    model = nn.Linear(2, 2)
    state: Any = polyamp.init(model, polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1)))
    grads = [p.detach() for p in model.parameters()]
    assert (state.complex_parameters, state.shards, state.plain(grads) is grads) == ([], None, True)
