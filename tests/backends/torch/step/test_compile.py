"""`train_step(compile=True)`: one graph, compiled once, equal to the eager step; what cannot be compiled says so.

Most tests use the backend "aot_eager", which traces and functionalises like the default one and generates no code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import polyamp
from polyamp.errors import LossError, ModelError, UnsupportedError

TRACED: dict[str, Any] = {"backend": "aot_eager"}
INF, NAN = float("inf"), float("nan")
GAINS = (INF, 1.0, 1.0, NAN, 1.0, 1.0)
RATE = polyamp.schedules.warmup_cosine(0.1, warmup_steps=2, total_steps=20, start=0.01)


@pytest.fixture(autouse=True)
def compiled_once() -> Iterator[None]:
    """A second compilation of one step is an error."""
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


class Network(nn.Module):
    """A tied weight, a frozen layer, an unused parameter, BatchNorm and a buffer that the forward pass writes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 2)
        self.spare = nn.Parameter(torch.ones(3))
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.second(torch.tanh(self.first(x)))
        h = self.norm(h) + self.frozen(x)
        self.average.mul_(0.9).add_(h.detach().float().mean(0))
        out: torch.Tensor = self.head(h)
        return out


class Unnormed(Network):
    """Without BatchNorm, which eager torch rounds to 16 bits between its parts and the default compiler does not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()  # type: ignore[assignment]  # in the place of BatchNorm1d


class Small(nn.Module):
    """A layer and an unused parameter, and no bias in front of BatchNorm: its gradient is rounding errors alone, which
    optimizers that divide by its size blow up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(6, 2)
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x)
        return out


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch["x"]) * batch["gain"], batch["y"])


def item(gain: float, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(8, 6)).astype(np.float32), rng.normal(size=(8, 2)).astype(np.float32)
    return {"x": x, "y": y, "gain": np.full((8, 2), gain, np.float32)}


def trained(recipe: polyamp.Recipe, how: Any, model: nn.Module | None = None) -> tuple[Any, list[Any]]:
    """The state after GAINS, and (scale, skipped, step, loss, grad_norm) of every step."""
    state = polyamp.init(model or Network(), recipe)
    step = polyamp.train_step(loss_fn, recipe, compile=how)
    trace = []
    for seed, gain in enumerate(GAINS):
        before = state.backend.export_state(state)
        state, result = step(state, item(gain, seed))
        trace.append((float(result.scale), bool(result.skipped), int(result.step), *map(float, result[:3:2])))
        if gain != 1.0:
            after = state.backend.export_state(state)
            changed = {name for name in before if before[name].tobytes() != after[name].tobytes()}
            assert all(name.startswith("loss_scale/") for name in changed), "S12"
    return state, trace


def agree(
    recipe: polyamp.Recipe, how: Any = TRACED, *, tolerance: float = 2e-6, model: Callable[[], nn.Module] = Network
) -> None:
    """Eager and compiled: the same scales, flags and counts exactly, everything else to rounding."""
    (eager, wanted), (compiled, found) = trained(recipe, False, model()), trained(recipe, how, model())
    assert [row[:3] for row in found] == [row[:3] for row in wanted]
    np.testing.assert_allclose([r[3:] for r in found], [r[3:] for r in wanted], rtol=max(2e-5, tolerance))
    assert counters["stats"]["unique_graphs"] == 1
    one, other = (state.backend.export_state(state) for state in (eager, compiled))
    assert one.keys() == other.keys()
    for name, value in one.items():
        if not name.startswith("rng/"):
            np.testing.assert_allclose(other[name], value, rtol=1e-5, atol=tolerance, err_msg=name)
    assert torch.equal(compiled.model.spare, torch.ones(3)), "the loss does not depend on it"


def recipe(optimizer: Any, policy: Any = "mixed_bfloat16", **changes: Any) -> polyamp.Recipe:
    scaler = polyamp.LossScaler(init_scale=16.0, growth_interval=2)
    return polyamp.Recipe(**{"policy": policy, "optimizer": optimizer, "scaler": scaler, "clip_norm": 0.5, **changes})


SPECS = {
    "sgd": polyamp.sgd(RATE, momentum=0.9, weight_decay=0.1),
    "adam": polyamp.adam(0.01),
    "adamw": polyamp.adamw(RATE),
    "rmsprop": polyamp.rmsprop(0.01, momentum=0.5, centered=True),
    "adagrad": polyamp.adagrad(RATE, lr_decay=0.1),
    "lion": polyamp.lion(0.001),
    "nadam": polyamp.nadam(0.01),
    "amsgrad": polyamp.adamw(0.01, amsgrad=True),
    "lamb": polyamp.lamb(0.01),
    "adafactor": polyamp.adafactor(polyamp.schedules.linear_warmup(0.01, 3, 0.001), weight_decay=0.1),
    "muon": polyamp.muon(0.01),
    "schedule_free": polyamp.schedule_free(0.01, weight_decay=0.1),
}


def test_a_loss_makes_numpy_arrays_itself_in_the_graph() -> None:
    """torch's compiler traces no dtype of them (found by the fuzzer)."""

    def weighted(model: Any, batch: Any) -> Any:
        weights = np.linspace(0.5, 1.5, 2, dtype=np.float32)
        return polyamp.losses.softmax_cross_entropy(
            model(batch["x"]), (batch["y"][:, 0] > 0).long(), class_weights=weights
        )

    found = []
    for how in (False, TRACED):
        made = recipe(polyamp.sgd(0.1), "float32")
        state = polyamp.init(Small(), made)
        _, result = polyamp.train_step(weighted, made, compile=how)(state, item(1.0, 0))
        found.append(float(result.loss))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.parametrize("name", SPECS)
def test_every_optimizer_in_one_graph(name: str) -> None:
    agree(recipe(SPECS[name]), model=Network if name in ("sgd", "adagrad") else Small)


@pytest.mark.parametrize(
    "policy",
    [
        polyamp.Policy("mixed_float16", mode="autocast"),
        polyamp.Policy("mixed_bfloat16", mode="autocast", op_list="native", float32_matmul="high"),
        polyamp.Policy("mixed_bfloat16", mode="autocast", overrides={"head": "float32", "second": "float16"}),
        polyamp.Policy("mixed_bfloat16", mode="cast"),
    ],
    ids=["autocast", "native", "overrides", "cast"],
)
def test_policies(policy: Any) -> None:
    before = torch.get_float32_matmul_precision()
    agree(recipe(polyamp.sgd(0.1, momentum=0.9), policy), tolerance=1e-4)
    assert torch.get_float32_matmul_precision() == before


def test_accumulation_clips_and_steps_once_a_window() -> None:
    agree(recipe(polyamp.sgd(0.1, momentum=0.9), "float32", accumulate_steps=2))


def test_without_a_scaler_and_without_a_clip() -> None:
    made = recipe(polyamp.sgd(0.1), "float32", scaler="off", clip_norm=None)
    weights = []
    for how in (False, TRACED):
        state = polyamp.init(Network(), made)
        step = polyamp.train_step(loss_fn, made, compile=how)
        for seed in range(3):
            state, result = step(state, item(1.0, seed))
        assert (int(result.step), bool(result.skipped), float(result.scale)) == (3, False, 1.0)
        weights.append(state.model.head.weight.detach())
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own
def test_the_default_compiler() -> None:
    agree(recipe(polyamp.sgd(0.1, momentum=0.9), "float32"), True, tolerance=1e-4)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own
def test_the_default_compiler_in_float16() -> None:
    agree(recipe(polyamp.sgd(0.1, momentum=0.9), "mixed_float16"), True, model=Unnormed)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own
def test_the_default_compiler_in_bfloat16_with_batch_norm() -> None:
    """It keeps float32 between fused operations, where eager torch rounds: so it is not held to eager's numbers."""
    made = polyamp.sgd(0.1, momentum=0.9)
    (_, exact), (_, eager), (_, compiled) = (
        trained(recipe(made, policy), how)
        for policy, how in (("float32", False), ("mixed_bfloat16", False), ("mixed_bfloat16", True))
    )
    assert [row[:3] for row in compiled] == [row[:3] for row in eager] == [row[:3] for row in exact]
    wide, rounded, fused = (np.asarray([row[3:] for row in rows if not row[1]]) for rows in (exact, eager, compiled))
    far = np.abs(rounded / wide - 1.0).max()
    assert 0.0 < np.abs(fused / wide - 1.0).max() <= 2.0 * far < 0.1
    assert counters["stats"]["unique_graphs"] == 1


def test_a_changed_rate_is_not_compiled_again() -> None:
    made = recipe(polyamp.sgd(0.1), "float32")
    weights = []
    for how in (False, TRACED):
        state = polyamp.init(Network(), made)
        step = polyamp.train_step(loss_fn, made, compile=how)
        for seed, rate in enumerate((0.1, 0.05, 0.025)):
            state.optimizer.param_groups[0]["lr"] = rate
            state, _ = step(state, item(1.0, seed))
        weights.append(state.model.head.weight.detach())
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)


def test_states_of_one_step_are_compiled_apart() -> None:
    made = recipe(polyamp.sgd(0.1), "float32")
    step = polyamp.train_step(loss_fn, made, compile={"backend": "eager"})
    states = [polyamp.init(Network(), made) for _ in range(2)]
    for seed in range(2):
        for state in states:
            step(state, item(1.0, seed))
    assert counters["stats"]["unique_graphs"] == 2
    assert torch.equal(states[0].model.head.weight, states[1].model.head.weight)


def test_eager_and_compiled_steps_take_turns_and_resume(tmp_path: Any) -> None:
    made = recipe(polyamp.adamw(RATE), "float32")
    compiled, eager = (polyamp.train_step(loss_fn, made, compile=how) for how in (TRACED, False))
    state = polyamp.init(nn.Linear(6, 2), made)
    compiled(state, item(1.0, 0))
    eager(state, item(1.0, 1))
    polyamp.save(state, tmp_path / "checkpoint")
    compiled(state, item(1.0, 2))
    straight = state.model.weight.detach().clone()
    polyamp.restore(state, tmp_path / "checkpoint")
    _, result = compiled(state, item(1.0, 2))
    assert torch.equal(state.model.weight, straight)
    assert int(result.step) == 3


def test_aux_of_every_kind() -> None:
    def with_aux(model: Any, batch: Any) -> Any:
        out = model(batch["x"])
        return polyamp.losses.mean_squared_error(out, batch["y"]), {"out": (out, None), "count": 3, "note": "text"}

    made = recipe(polyamp.sgd(0.1), "float32", accumulate_steps=2)
    for changes, shape in (({}, (2, 4, 2)), ({"accumulate_steps": 1}, (8, 2))):
        own = made.replace(**changes)

        def plain(model: Any, batch: Any) -> Any:
            loss, aux = with_aux(model, batch)
            return loss, {"out": aux["out"][0]}

        used = with_aux if own.accumulate_steps == 1 else plain
        step = polyamp.train_step(used, own, compile=TRACED)
        _, result = step(polyamp.init(nn.Linear(6, 2), own), item(1.0, 0))
        out = result.aux["out"]
        out = out[0] if isinstance(out, tuple) else out
        assert out.shape == shape
        assert not out.requires_grad
        if own.accumulate_steps == 1:
            assert (result.aux["out"][1], result.aux["count"], result.aux["note"]) == (None, 3, "text")


def test_the_first_try_leaves_no_trace() -> None:
    """`loss_fn` runs once without compiling before the first step: neither buffers nor random numbers nor gradients
    show it."""
    made = recipe(polyamp.sgd(0.0), "float32")
    model = Network()
    model.head.weight.grad = torch.full_like(model.head.weight, 7.0)
    state = polyamp.init(model, made)
    torch.manual_seed(5)
    polyamp.train_step(loss_fn, made, compile=TRACED)(state, item(1.0, 0))
    assert int(model.norm.num_batches_tracked) == 1
    assert torch.equal(model.head.weight.grad, torch.full_like(model.head.weight, 7.0))
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))


# --- what is refused


def run(loss: Any, model: nn.Module, how: Any = TRACED, **changes: Any) -> None:
    made = recipe(**{"optimizer": polyamp.sgd(0.1), "policy": "float32", **changes})
    polyamp.train_step(loss, made, compile=how)(polyamp.init(model, made), item(1.0, 0))


def test_options_and_recipes_that_cannot_be_compiled() -> None:
    model = nn.Linear(6, 2)
    with pytest.raises(UnsupportedError, match=r"compile must be True, False or a dict.*Received: compile='inductor'"):
        run(loss_fn, model, "inductor")
    with pytest.raises(UnsupportedError, match=r"accepts backend, mode, options, dynamic\. Received: fullgraph="):
        run(loss_fn, model, {"fullgraph": False})
    cast = polyamp.Policy("mixed_bfloat16", mode="cast", overrides={"0": "float32"})
    with pytest.raises(UnsupportedError, match="takes overrides in mode='autocast' only"):
        run(loss_fn, nn.Sequential(model), policy=cast)
    with pytest.raises(UnsupportedError, match=r"loss_fn reads requires_grad.*polyamp.parameters\(model\)"):
        run(lambda m, b: sum(p.square().sum() for p in m.parameters() if p.requires_grad), model)


def test_what_the_eager_step_refuses_is_refused_in_the_same_words() -> None:
    with pytest.raises(LossError, match="Is it detached"):
        run(lambda m, b: loss_fn(m, b).detach(), nn.Linear(6, 2))
    with pytest.raises(LossError, match="must return a scalar loss"):
        run(lambda m, b: m(b["x"]), nn.Linear(6, 2))
    model = Network()
    made = recipe(polyamp.sgd(0.1), "float32")
    state = polyamp.init(model, made)
    model.frozen.requires_grad_(True)
    with pytest.raises(ModelError, match="'frozen/weight' was unfrozen after init"):
        polyamp.train_step(loss_fn, made, compile=TRACED)(state, item(1.0, 0))


class Replacing(nn.Module):
    """Its forward pass puts a new tensor in the place of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)
        self.register_buffer("last", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        self.last = out.detach().mean(0)
        return out


def test_what_a_graph_cannot_follow_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"replaces the buffer 'last'.*buffer\.copy_\(value\)"):
        run(loss_fn, Replacing())
    with pytest.raises(UnsupportedError, match=r"aux must hold tensors.*Received: set"):
        run(lambda m, b: (loss_fn(m, b), {1, 2}), nn.Linear(6, 2))

    def branching(model: Any, batch: Any) -> Any:
        loss = loss_fn(model, batch)
        return loss * 2 if float(loss.detach()) > 0 else loss

    model = nn.Linear(6, 2)
    before = model.weight.detach().clone()
    with pytest.raises(
        UnsupportedError, match=r"could not compile the step into one graph\. torch says: .*compile=Fal"
    ):
        run(branching, model)
    assert torch.equal(before, model.weight)


class Branches(nn.Module):
    """Which head runs is the model's own business."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 2)])
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.heads[self.turn](x)
        return out


def test_a_branch_with_other_parameters_is_refused() -> None:
    """The graph holds those of the first step; the others would never be trained, and these would drift by momentum."""
    model = Branches()
    recipe = polyamp.Recipe(optimizer=polyamp.adamw(0.1))
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(loss_fn, recipe, compile=TRACED)
    step(state, item(1.0, 0))
    before = state.backend.export_state(state)
    with torch._dynamo.config.patch(error_on_recompile=False):
        model.turn = 1
        with pytest.raises(
            UnsupportedError, match=r"now depends on the parameter 'heads/1/weight'.*Use compile=False\.$"
        ):
            step(state, item(1.0, 1))
        after = state.backend.export_state(state)
        assert [name for name in before if before[name].tobytes() != after[name].tobytes()] == []
        model.turn = 0
        assert int(step(state, item(1.0, 2))[1].step) == 2


def test_a_divisor_beyond_float32_counts_as_not_finite_as_off_the_cpu() -> None:
    """A graph looks at nothing, so that what the eager step does on the CPU by looking is not there."""
    settings: Any = {"optimizer": polyamp.sgd(0.1), "clip_norm": 1e-3, "scaler": polyamp.LossScaler(init_scale=1.0)}
    recipe, skipped = polyamp.Recipe(**settings), []
    for how in (False, TRACED):
        state = polyamp.init(nn.Linear(3, 3, bias=False), recipe)
        step = polyamp.train_step(lambda model, x: model(x).sum() * 1e36, recipe, compile=how)
        skipped.append(bool(step(state, torch.ones(2, 3))[1].skipped))
    assert skipped == [False, True]


def test_batches_of_another_shape_and_modes_are_compiled_again() -> None:
    def part(seed: int) -> dict[str, Any]:
        return {name: value[: 8 - seed] for name, value in item(1.0, seed).items()}

    weights = []
    for how in (False, {"backend": "eager"}):
        made = recipe(polyamp.sgd(0.1, momentum=0.9), "float32")
        state = polyamp.init(Network(), made)
        step = polyamp.train_step(loss_fn, made, compile=how)
        with torch._dynamo.config.patch(error_on_recompile=False):
            for seed in range(4):
                state.model.train(seed % 2 == 0)
                step(state, part(seed))
        weights.append(state.model.state_dict())
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-5, atol=1e-6)


def test_trap_torchs_scaler_cannot_be_in_the_graph() -> None:
    """What `trained` does in one graph, scale and skip included, torch's scaler breaks."""
    model, scaler = nn.Linear(6, 2), torch.amp.GradScaler("cpu")

    @torch.compile(backend="eager", fullgraph=True)
    def scaled(x: torch.Tensor) -> Any:
        return scaler.scale(model(x).sum())

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"GradScaler\.scale"):
        scaled(torch.ones(1, 6))
    _, trace = trained(polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.sgd(0.1)), TRACED)
    assert [bool(skipped) for _, skipped, *_ in trace] == [True, False, False, True, False, False]


def test_an_option_written_into_the_group_counts() -> None:
    """A new graph holds it: numbers of the optimizer are constants in the compiled one."""
    weights = []
    for how in (False, {"backend": "eager"}):
        recipe = polyamp.Recipe(optimizer=polyamp.adamw(0.1))
        state = polyamp.init(Small(), recipe)
        step = polyamp.train_step(loss_fn, recipe, compile=how)
        step(state, item(1.0, 0))
        state.optimizer.param_groups[0]["weight_decay"] = 0.5
        step(state, item(1.0, 1))
        weights.append(state.model.head.weight.detach().clone())
    torch.testing.assert_close(*weights)


def test_maximize_is_refused() -> None:
    recipe = polyamp.Recipe(optimizer=polyamp.sgd(0.1))
    state = polyamp.init(Network(), recipe)
    state.optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(UnsupportedError, match=r"SGD minimises\. Return the negative loss"):
        polyamp.train_step(loss_fn, recipe, compile=TRACED)(state, item(1.0, 0))
