"""The torch step where only torch has the problem: fused kernels, the autocast cache, native optimizers, buffers."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import polyamp
from polyamp.errors import LossError, ModelError, UnsupportedError

SCALER = polyamp.LossScaler(init_scale=16.0, on_stuck="ignore")


def linear(seed: int = 0, size: int = 6) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(size, 2)


def batch(gain: float = 1.0, seed: int = 0, size: int = 6) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(4, size)).astype(np.float32)
    return {"x": x, "y": rng.normal(size=(4, 2)).astype(np.float32), "gain": np.full((4, 2), gain, np.float32)}


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch["x"]) * batch["gain"], batch["y"])


def trained(model: nn.Module, recipe: polyamp.Recipe, gains: list[float]) -> Any:
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(loss_fn, recipe)
    for i, gain in enumerate(gains):
        state, _ = step(state, batch(gain, seed=i))
    return state


def test_trap_plain_torch_falls_to_scale_zero_and_writes_nan() -> None:
    """What happens without polyamp; the conformance suite's s17 shows that it does not happen here."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for gain in [float("inf")] * 200 + [1.0]:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(torch.ones(1, 6)) * gain, torch.zeros(1, 2))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 0.0
    assert torch.isnan(model.weight).all()


@pytest.mark.parametrize("native", [False, True])
def test_trap_fused_sgd_skipped_first_step_keeps_momentum_clean(native: bool, request: pytest.FixtureRequest) -> None:
    """torch's fused SGD allocates its momentum without filling it when its very first step is skipped."""
    clean, skipped, plain = linear(), linear(), linear()
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory with NaN, so that chance cannot hide it
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    alone: Any = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9, fused=True)
    for flag in (1.0, 0.0):
        alone.found_inf, alone.grad_scale = torch.tensor(flag), None
        plain(torch.ones(1, 6)).sum().backward()
        alone.step()
    assert torch.isnan(plain.weight).all(), "what torch does by itself"
    made: list[torch.Tensor] = []
    for model, gains in ((clean, [1.0, 1.0]), (skipped, [float("inf"), 1.0, 1.0])):
        optimizer: Any = polyamp.sgd(0.1, momentum=0.9)
        if native:
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=True)
        recipe = polyamp.Recipe(optimizer=optimizer, scaler=polyamp.LossScaler.static(4.0))
        state = polyamp.init(model, recipe)
        step = polyamp.train_step(loss_fn, recipe)
        for gain in gains:
            state, _ = step(state, batch(gain))
        made.append(model.weight.detach().clone())
    assert torch.equal(*made)


def test_trap_an_open_autocast_region_does_not_serve_stale_weights() -> None:
    recipe = polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.sgd(0.5))
    outside, inside = linear(), linear()
    trained(outside, recipe, [1.0] * 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trained(inside, recipe, [1.0] * 4)
    assert torch.equal(outside.weight, inside.weight)


class Tied(nn.Module):
    """One weight used by two submodules."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        k = self.second(h)
        self.seen += [h.dtype, k.dtype]
        out: torch.Tensor = self.head(k)
        return out


def test_trap_nested_dtypes_on_one_tied_weight() -> None:
    """The weight cache is keyed by the tensor alone, so plain nested regions raise or reuse the wrong dtype."""
    weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(1, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        functional.linear(x, weight)
        with torch.autocast("cpu", dtype=torch.float16), pytest.raises(RuntimeError, match="same dtype"):
            functional.linear(x, weight)
    model = Tied()
    policy = polyamp.Policy("mixed_bfloat16", overrides={"second": "float16", "head": "float32"})
    trained(model, polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1), scaler=SCALER), [1.0])
    assert model.seen == [torch.bfloat16, torch.float16]


def test_overrides_leave_no_hooks_behind() -> None:
    model = nn.Sequential(nn.Linear(6, 2))
    policy = polyamp.Policy("mixed_bfloat16", overrides={"0": "float32"})
    bound = policy.autocast(model)
    bound(torch.ones(1, 6))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        bound(torch.ones(1, 5))
    assert not model[0]._forward_pre_hooks
    assert not model[0]._forward_hooks
    assert not torch.is_autocast_enabled("cpu")
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    assert depth == 1, "an open region would keep torch from ever clearing its weight cache"
    assert bound(torch.ones(1, 6)).dtype == torch.float32


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_cast_mode_casts_parameters_once_and_keeps_batch_norm(policy: str) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    model[1].register_forward_hook(lambda m, a, out: seen.append(m.weight.dtype))
    recipe = polyamp.Recipe(policy=polyamp.Policy(policy, mode="cast"), optimizer=polyamp.sgd(0.1), scaler=SCALER)
    state = trained(model, recipe, [1.0, 1.0])
    assert seen[:2] == [getattr(torch, recipe.policy.compute), torch.float32]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {b.dtype for b in model.buffers()} == {torch.float32, torch.int64}
    assert (int(state.step), int(model[1].num_batches_tracked)) == (2, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
        lambda p: torch.optim.RMSprop(p, 1e-2),
        lambda p: torch.optim.NAdam(p, 1e-2),
    ],
    ids=["SGD", "AdamW-fused", "RMSprop", "NAdam"],
)
def test_native_optimizers_step_only_when_finite(make: Any) -> None:
    weights, exported = [], []
    for gains in ([1.0, 1.0, 1.0], [float("nan"), 1.0, 1.0, float("inf"), 1.0]):
        model = linear()
        optimizer = make(model.parameters())
        recipe = polyamp.Recipe(optimizer=optimizer, scaler=polyamp.LossScaler.static(4.0))
        state = polyamp.init(model, recipe)
        step = polyamp.train_step(loss_fn, recipe)
        for gain in gains:
            state, _ = step(state, batch(gain))
        assert int(state.step) == 3
        weights.append(model.weight.detach().clone())
        exported.append(state.backend.export_state(state))
    assert torch.equal(*weights)
    slots = [name for name in exported[0] if name.startswith("optimizer/")]
    assert all(np.array_equal(exported[0][name], exported[1][name]) for name in slots)


def test_native_optimizer_matches_torchs_own_loop() -> None:
    """AdamW with clipping: the step equals the loop written by hand."""
    model, plain = linear(), linear()
    recipe = polyamp.Recipe(optimizer=polyamp.adamw(1e-2), clip_norm=0.1)
    trained(model, recipe, [1.0] * 10)
    optimizer = torch.optim.AdamW(plain.parameters(), 1e-2)
    for i in range(10):
        item = {name: torch.from_numpy(value) for name, value in batch(seed=i).items()}
        optimizer.zero_grad()
        functional.mse_loss(plain(item["x"]), item["y"]).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
    torch.testing.assert_close(model.weight, plain.weight, rtol=2e-5, atol=1e-7)


def test_optimizers_that_do_not_fit_are_refused() -> None:
    model = linear()
    with pytest.raises(UnsupportedError, match="exactly the model's trainable parameters"):
        polyamp.init(model, polyamp.Recipe(optimizer=torch.optim.SGD([model.weight], 0.1)))
    with pytest.raises(UnsupportedError, match="LBFGS evaluates the loss several times"):
        polyamp.init(model, polyamp.Recipe(optimizer=torch.optim.LBFGS(model.parameters())))
    with pytest.raises(UnsupportedError, match=r"Received: torch\.nn\.modules\.linear\.Linear"):
        polyamp.init(model, polyamp.Recipe(optimizer=model))


def test_frozen_parameters_stay() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    model[0].requires_grad_(False)
    frozen = model[0].weight.clone()
    trained(model, polyamp.Recipe(optimizer=polyamp.adamw(0.1)), [1.0, 1.0])
    assert torch.equal(frozen, model[0].weight)


def test_a_loss_without_a_gradient_is_refused() -> None:
    recipe = polyamp.Recipe()
    state = polyamp.init(linear(), recipe)
    step = polyamp.train_step(lambda model, batch: loss_fn(model, batch).detach(), recipe)
    with pytest.raises(LossError, match="Is it detached"):
        step(state, batch())


def test_a_one_element_float16_loss_is_upcast() -> None:
    """torch's own scaler gives inf for a float16 loss of shape (1,)."""
    loss = torch.full((1,), 3.0, dtype=torch.float16)
    assert torch.isinf(torch.amp.GradScaler("cpu", init_scale=2.0**15).scale(loss)).all()
    scaler = polyamp.LossScaler()
    assert scaler.scale(loss, scaler.init("torch")).item() == 3.0 * 2.0**15


def test_sparse_gradients_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 2))
    recipe = polyamp.Recipe()
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(lambda m, b: m(b["i"]).square().mean(), recipe)
    with pytest.raises(
        UnsupportedError, match=r"'0/weight' is sparse.*or write the loop yourself with polyamp_torch\.Gr"
    ):
        step(state, {"i": np.array([1, 2])})


def test_models_on_meta_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match=r"on devices of one type that hold data\. Received: meta"):
        polyamp.init(model, polyamp.Recipe())
    with pytest.raises(ModelError, match="stored as bfloat16"):
        polyamp.init(linear().bfloat16(), polyamp.Recipe())


def test_pure_bfloat16_moves_whole_simd_blocks() -> None:
    """Fused SGD on the CPU leaves blocks of 64 16-bit elements as they were."""
    torch.manual_seed(0)
    model = nn.Linear(64, 2).bfloat16()
    recipe = polyamp.Recipe(policy="bf16-true", optimizer=polyamp.sgd(0.1, momentum=0.9))
    before = model.weight.detach().clone()
    step = polyamp.train_step(lambda m, b: m(b).float().square().mean(), recipe)
    step(polyamp.init(model, recipe), np.ones((4, 64), np.float32))
    assert model.weight.dtype == torch.bfloat16
    assert (model.weight != before).any(dim=1).all()


def test_the_modes_and_requires_grad_of_the_user_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).eval()
    trained(model, polyamp.Recipe(scaler=SCALER), [1.0])
    assert not model.training
    assert int(model[1].num_batches_tracked) == 0
    assert all(p.grad is None for p in model.parameters())


def test_batches_in_every_form() -> None:
    """Read-only NumPy, tensors, a DataLoader's dict, a tuple and bfloat16 arrays, without a warning."""
    import ml_dtypes

    recipe = polyamp.Recipe(policy="mixed_bfloat16")
    state = polyamp.init(linear(), recipe)
    x = np.ones((4, 6), np.float32)
    x.flags.writeable = False
    step = polyamp.train_step(lambda m, b: m(b[0]).float().square().mean(), recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for form in ((x,), (torch.ones(4, 6),), (x.astype(ml_dtypes.bfloat16),)):
            state, _ = step(state, form)
    loader = torch.utils.data.DataLoader([{"x": torch.ones(6), "y": torch.ones(2), "gain": torch.ones(2)}] * 8, 4)
    step = polyamp.train_step(loss_fn, recipe)
    for item in loader:
        state, _ = step(state, item)
    assert int(state.step) == 5


def test_the_native_object_is_a_region_of_torch_autocast() -> None:
    x = torch.ones(2, 2)
    with polyamp.Policy("mixed_bfloat16").native("torch"):
        assert (x @ x).dtype == torch.bfloat16
        with polyamp.Policy("float32").native("torch"):
            assert (x @ x).dtype == torch.float32
    assert (x @ x).dtype == torch.float32


def test_float32_matmul_is_scoped() -> None:
    before = torch.get_float32_matmul_precision()
    inner: list[str] = []
    policy = polyamp.Policy("float32", float32_matmul="medium")
    policy.autocast(lambda x: inner.append(torch.get_float32_matmul_precision()) or x)(torch.ones(1))
    assert inner == ["medium"]
    assert torch.get_float32_matmul_precision() == before


class Einsum(nn.Module):
    """Its weight's gradient comes out transposed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(2, 5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, self.w.transpose(1, 2))


class Shared(nn.Module):
    """Two parameters that get one and the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.a + self.b)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def channels_last() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(8, 4, 3), nn.Flatten())


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (Einsum, normal(2, 4, 3)),
        (Shared, normal(4, 3)),
        (channels_last, normal(4, 8, 6, 6).contiguous(memory_format=torch.channels_last)),
    ],
    ids=["transposed", "shared", "channels_last"],
)
def test_gradients_of_any_layout_are_applied_as_torch_would(make: Any, x: torch.Tensor) -> None:
    """Fused kernels read flat memory, and unscaling works in place: neither may see a view of something else."""
    mine, plain = make(), make()
    spec = polyamp.sgd(0.1, momentum=0.9)  # Adam would divide the rounding of tiny gradients by tiny roots
    recipe = polyamp.Recipe(optimizer=spec, scaler=polyamp.LossScaler.static(64.0), clip_norm=0.5)
    state = polyamp.init(mine, recipe)
    step = polyamp.train_step(lambda m, b: m(b[0]).square().mean(), recipe)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    for _ in range(10):
        step(state, (x,))
        optimizer.zero_grad()
        plain(x).square().mean().backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
    for a, b in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_replaced_gradients_go_by_name_dtype_and_layout() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    recipe = polyamp.Recipe(optimizer=polyamp.sgd(1.0))
    state = polyamp.init(model, recipe)
    before = [p.detach().clone() for p in model.parameters()]
    _, gradients = polyamp.value_and_grad(lambda m, b: m(b).square().mean())(state, np.ones((2, 4), np.float32))
    values = {name: value.double().t().contiguous().t() for name, value in reversed(gradients.values.items())}
    polyamp.apply_gradients(state, gradients._replace(values=values))
    for old, p, value in zip(before, model.parameters(), gradients.values.values(), strict=True):
        torch.testing.assert_close(p, old - value)


class Parts(nn.Module):
    """Modules in a list, called one by one, and a buffer beside a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.LayerNorm(6)])
        self.head = nn.Linear(6, 2)
        self.shift = nn.Parameter(torch.zeros(6))
        self.register_buffer("offset", torch.ones(6))
        self.register_buffer("cache", None)
        self.seen: list[torch.dtype] = []

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            self.seen.append(x.dtype)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.encode(x) + self.shift + self.offset
        self.cache = h.detach().float().mean(0)
        out: torch.Tensor = self.head(h)
        self.seen.append(out.dtype)
        return out


@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_overrides_reach_modules_that_are_called_one_by_one(mode: Any) -> None:
    model = Parts()
    inner: list[torch.dtype] = []
    for block in model.blocks:
        block.register_forward_hook(lambda m, a, out: inner.append(out.dtype))
    policy = polyamp.Policy("mixed_bfloat16", mode=mode, overrides={"blocks": "float32"})
    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1))
    state = polyamp.init(model, recipe)
    polyamp.train_step(loss_fn, recipe)(state, batch())
    assert inner == [torch.float32] * 2
    assert model.seen[-1] == torch.bfloat16
    assert model.cache is not None
    assert model.offset.dtype == torch.float32
    model.seen.clear()
    run = polyamp.value_and_grad(lambda m, b: m.encode(b["x"]).float().square().mean() + m(b["x"]).mean())
    run(state, batch())
    assert model.seen[-1] == torch.bfloat16


def test_an_override_that_cannot_act_is_refused() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(6, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.attn(x[:, None], x[:, None], x[:, None])[0]
            return out[:, 0]

    policy = polyamp.Policy("mixed_bfloat16", overrides={"attn/out_proj": "float32"})
    recipe = polyamp.Recipe(policy=policy)
    state = polyamp.init(Attention(), recipe)
    step = polyamp.train_step(lambda m, b: m(b["x"]).square().mean(), recipe)
    with pytest.raises(UnsupportedError, match=r"'attn/out_proj' is never called as a module.*Override 'attn' instead"):
        step(state, batch())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_activation_checkpointing(mode: Any, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
            self.plain = False

        def forward(self, x: torch.Tensor) -> Any:
            if self.plain:
                return self.inner(x)
            return checkpoint(self.inner, x.requires_grad_(), use_reentrant=reentrant)

    ends = []
    for plain in (True, False):
        model = Checkpointed()
        model.plain = plain
        policy = polyamp.Policy("mixed_bfloat16", mode=mode, overrides={"inner/2": "float32"})
        trained(model, polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1)), [1.0, 1.0])
        ends.append(model.inner[0].weight.detach())
    torch.testing.assert_close(*ends)


def test_tied_weights_train_in_cast_mode() -> None:
    model = Tied()
    policy = polyamp.Policy("mixed_bfloat16", mode="cast")
    trained(model, polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1)), [1.0])
    assert model.seen == [torch.bfloat16] * 2
    assert model.first.weight is model.second.weight
    assert isinstance(model.first.weight, nn.Parameter)
    contradictory = policy.replace(overrides={"second": "float32"})
    with pytest.raises(polyamp.PolicyError, match="A shared tensor has one dtype"):
        trained(Tied(), polyamp.Recipe(policy=contradictory), [1.0])


def test_the_bound_model_is_the_module_in_everything_but_its_call() -> None:
    import copy

    model = nn.Sequential(nn.Linear(6, 2))
    state = polyamp.init(model, polyamp.Recipe())
    assert state.bound[0] is model[0]
    assert len(state.bound) == 1
    state.bound.note = 3
    assert model.note == 3
    copied = copy.deepcopy(state)
    assert copied.model is not model
    assert torch.equal(copied.model[0].weight, model[0].weight)


def test_a_parameter_frozen_after_init_is_named() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    recipe = polyamp.Recipe()
    state = polyamp.init(model, recipe)
    model[0].requires_grad_(False)
    with pytest.raises(ModelError, match="'0/weight' was frozen after init"):
        polyamp.train_step(loss_fn, recipe)(state, batch())


def test_states_that_take_turns_are_all_watched() -> None:
    scaler = polyamp.LossScaler(init_scale=1.0, min_scale=1.0, patience=2)
    recipe = polyamp.Recipe(scaler=scaler, optimizer=polyamp.sgd(0.1))
    stuck, fine = (polyamp.init(linear(), recipe) for _ in range(2))
    step = polyamp.train_step(loss_fn, recipe)

    def turns() -> None:
        for _ in range(20):
            step(stuck, batch(float("nan")))
            step(fine, batch())

    with pytest.raises(polyamp.LossScaleStuckError):
        turns()


def test_reversed_foreign_and_textual_arrays() -> None:
    from collections import UserDict, defaultdict

    recipe = polyamp.Recipe(accumulate_steps=2)
    state = polyamp.init(linear(), recipe)
    step = polyamp.train_step(lambda m, b: m(b["x"]).square().mean(), recipe)
    x = np.ones((4, 6), np.float32)
    for value in (x[:, ::-1], x.astype(">f4")):
        step(state, {"x": value, "names": np.array(["a", "b", "c", "d"]), "note": None, "factor": 2.0})
    step(state, UserDict(x=x))
    step(state, defaultdict(list, x=x))
    assert int(state.step) == 4
    with pytest.raises(polyamp.BatchError, match="as a tuple or a dict"):
        step(state, [x, x])


def test_a_step_works_under_the_callers_no_grad() -> None:
    recipe = polyamp.Recipe(optimizer=polyamp.sgd(0.1), scaler=SCALER)
    state = polyamp.init(linear(), recipe)
    with torch.no_grad():
        state, _ = polyamp.train_step(loss_fn, recipe)(state, batch())
    assert int(state.step) == 1


def test_aux_and_loss_hold_no_graph() -> None:
    def with_aux(model: Any, batch: Any) -> Any:
        out = model(batch["x"])
        return polyamp.losses.mean_squared_error(out, batch["y"]), {"out": out}

    recipe = polyamp.Recipe(optimizer=polyamp.sgd(0.1))
    _, result = polyamp.train_step(with_aux, recipe)(polyamp.init(linear(), recipe), batch())
    assert not result.aux["out"].requires_grad
    assert not result.loss.requires_grad


def test_value_and_grad_of_several_states_changes_no_running_statistics() -> None:
    made = [nn.Sequential(nn.BatchNorm1d(6), linear(i)) for i in range(2)]
    recipe = polyamp.Recipe(optimizer=polyamp.sgd(0.1), scaler=SCALER)
    states = [polyamp.init(model, recipe) for model in made]
    before = [model[0].running_mean.clone() for model in made]
    polyamp.value_and_grad(lambda models, b: sum(loss_fn(m, b) for m in models))(states, batch())
    assert all(torch.equal(old, model[0].running_mean) for old, model in zip(before, made, strict=True))


def test_an_override_inside_another_has_its_own_dtype() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), nn.Linear(6, 2))
    seen: list[torch.dtype] = []
    for layer in model[0]:
        layer.register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    policy = polyamp.Policy("mixed_bfloat16", overrides={"0": "float32", "0/1": "float16"})
    policy.autocast(model)(torch.ones(1, 6))
    assert seen == [torch.float32, torch.float16]


@pytest.mark.parametrize("gain", [1.0, float("inf")])
def test_the_flag_does_not_stay_on_the_users_optimizer(gain: float) -> None:
    model = linear()
    native = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    recipe = polyamp.Recipe(optimizer=native, scaler=SCALER)
    polyamp.train_step(loss_fn, recipe)(polyamp.init(model, recipe), batch(gain))
    assert not hasattr(native, "found_inf")
    assert not hasattr(native, "grad_scale")
    before = model.weight.detach().clone()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    native.step()
    assert (model.weight != before).all()


def test_lion_decays_before_it_moves() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    recipe = polyamp.Recipe(optimizer=polyamp.lion(0.5, weight_decay=0.5))
    step = polyamp.train_step(lambda m, b: m(b).square().mean(), recipe)
    step(polyamp.init(model, recipe), np.ones((1, 1), np.float32))
    assert model.weight.item() == 2.0 * (1.0 - 0.25) - 0.5


def test_one_value_and_grad_serves_two_frameworks() -> None:
    from polyamp.reference import MLP

    run = polyamp.value_and_grad(loss_fn)
    for model in (MLP.random([6, 2], seed=0), linear()):
        state = polyamp.init(model, polyamp.Recipe(optimizer=polyamp.sgd(0.1)))
        _, result = polyamp.apply_gradients(state, run(state, batch())[1])
        assert int(result.step) == 1
