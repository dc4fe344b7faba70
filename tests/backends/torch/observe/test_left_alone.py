"""What is as before when a pass has been watched; and what of odd models is seen of it."""

from __future__ import annotations

import dataclasses
import random
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import polyamp
from polyamp_torch.observe.observer import OBSERVER

RECIPE = polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.adam(0.1))
X = np.random.default_rng(0).standard_normal((4, 3), "f4")


def loss_fn(model: Any, batch: Any) -> Any:
    return model(batch).float().square().mean()


def seen_of(model: nn.Module, recipe: Any = RECIPE, loss: Any = loss_fn, data: Any = X) -> tuple[list[Any], Any]:
    seen: list[Any] = []
    watched = OBSERVER.capture_pass(polyamp.init(model, recipe), loss, data, lambda *each: seen.append(each))
    return seen, watched


class Remembers(nn.Module):
    """A model that changes itself whenever it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.calls = 0
        self.history: list[int] = []
        self.known: dict[str, int] = {}
        self.total = torch.zeros(4)
        self.stream = torch.Generator().manual_seed(1)

    def forward(self, x: Any) -> Any:
        self.calls += 1
        self.history.append(self.calls)
        self.known[f"call {self.calls}"] = self.calls
        self.cache = x
        noise = torch.rand(4, generator=self.stream) + torch.rand(4) + random.random() + np.random.rand()  # noqa: NPY002
        y = self.norm(self.layer(x)) * noise
        self.total += y.detach().sum(0)
        return y


def everything(model: Any, state: Any) -> dict[str, Any]:
    found: dict[str, Any] = {f"state/{name}": array.tobytes() for name, array in state.export().items()}
    found |= {
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tobytes(),  # type: ignore[union-attr]  # noqa: NPY002
        "stream": model.stream.get_state().numpy().tobytes(),
        "grad": [p.grad is None for p in model.parameters()],
        "attributes": (model.calls, list(model.history), dict(model.known), hasattr(model, "cache")),
        "total": model.total.numpy().tobytes(),
        "hooks": [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()],
        "modes": len(torch.overrides._get_current_function_mode_stack()),
        "dtype": torch.get_default_dtype(),
    }
    return found


def test_a_watched_pass_changes_nothing() -> None:
    torch.manual_seed(0)
    model = Remembers()
    state = polyamp.init(model, RECIPE)
    state, _ = polyamp.train_step(loss_fn, RECIPE)(state, X)
    model.layer.weight.grad = torch.ones(4, 3)
    before = everything(model, state)
    seen: list[Any] = []
    graphs = state.graphs
    OBSERVER.capture_pass(state, loss_fn, X, lambda *each: seen.append(each))
    assert [what for _, what, *_ in seen] == ["input", "output"] * 2 + ["output"] + ["cotangent"] * 3
    assert everything(model, state) == before
    assert torch.equal(model.layer.weight.grad, torch.ones(4, 3))
    assert state.graphs is graphs
    with pytest.raises(ZeroDivisionError):
        OBSERVER.capture_pass(state, loss_fn, X, lambda *each: 1 / 0)
    with pytest.raises(polyamp.LossError):
        OBSERVER.capture_pass(state, lambda model, batch: model(batch), X, lambda *each: None)
    assert everything(model, state) == before


def test_a_step_after_a_watched_pass_is_the_step_without_it() -> None:
    found = []
    for watches in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
        state = polyamp.init(model, RECIPE)
        step = polyamp.train_step(loss_fn, RECIPE)
        for _ in range(3):
            if watches:
                OBSERVER.capture_pass(state, loss_fn, X, lambda *each: None)
            state, _ = step(state, X)
        found.append(torch.cat([value.reshape(-1).double() for value in model.state_dict().values()]))
    assert torch.equal(*found)


class Many(nn.Module):
    """Gives a tensor in what `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(3, 3), kind

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        if self.kind == "tuple":
            return torch.arange(3), (y, y * 2)
        if self.kind == "dict":
            return OrderedDict(loss=y.mean(), z=y, a=y * 2)
        return Output(y.mean(), y)


@dataclasses.dataclass
class Output:
    """As transformers has them."""

    loss: Any
    logits: Any
    attentions: Any = None


@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass"])
def test_of_an_output_of_several_the_first_that_is_no_scalar(kind: str) -> None:
    pick = {"tuple": lambda out: out[1][0], "dict": lambda out: out["z"], "dataclass": lambda out: out.logits}[kind]
    model = nn.Sequential(Many(kind))
    seen, _ = seen_of(model, loss=lambda model, batch: pick(model(batch)).float().sum())
    arrays = {each[:2]: each[2] for each in seen}
    assert np.array_equal(arrays["0", "output"], arrays["0/layer", "output"])
    assert np.array_equal(arrays["0", "cotangent"], np.ones((4, 3)))


def test_a_linear_layer_obeys_the_sum_rules() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 2))
    seen, watched = seen_of(model, RECIPE.replace(policy="float32"))
    arrays = {each[:2]: each[2] for each in seen}
    for name, inputs in (("0", X), ("2", arrays["1", "output"])):
        cotangent = arrays[name, "cotangent"]
        assert np.allclose(watched.gradients[f"{name}/bias"], cotangent.sum(0), rtol=1e-5)
        assert np.allclose(watched.gradients[f"{name}/weight"], cotangent.T @ inputs, rtol=1e-4, atol=1e-7)
    assert float(arrays["0", "output"].min()) < 0  # as it was before the next one wrote to it


def test_inputs_are_those_of_modules_with_none_inside_and_only_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Identity(), nn.Sequential(nn.GELU()))
    seen, _ = seen_of(model)
    arrays = {each[:2]: each[2] for each in seen}
    assert [path for path, what, *_ in seen if what == "input"] == ["0", "3/0"]
    assert np.array_equal(arrays["0", "input"], X)
    assert np.array_equal(arrays["3/0", "input"], arrays["2", "output"])


def test_a_tied_parameter_has_one_gradient_and_an_unused_one_none() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    _, watched = seen_of(model)
    assert {name: value is None for name, value in watched.gradients.items()} == {
        "unused": True,
        "0/weight": False,
        "0/bias": False,
    }
    assert watched.gradients["0/weight"].dtype == np.float32


def test_wide_models_are_seen_in_float64() -> None:
    with OBSERVER.model_copy(nn.Sequential(nn.Linear(3, 3)), wide=True) as twin:
        seen, watched = seen_of(twin, RECIPE.replace(policy=polyamp.Policy(param="float64", compute="float64")))
    assert {(each[2].dtype.name, each[3]) for each in seen} == {("float64", "float64")}
    assert watched.gradients["0/weight"].dtype == np.float64


def test_a_pass_that_the_loss_runs_backward_itself_is_not_taken_for_the_gradient() -> None:
    model = nn.Sequential(nn.Linear(3, 3))

    def penalty(model: Any, batch: Any) -> Any:
        x = batch.requires_grad_()
        y = model(x).float().square().sum()
        (inner,) = torch.autograd.grad(y, x, create_graph=True)
        return y + inner.square().sum()

    seen, _ = seen_of(model, RECIPE.replace(policy="float32"), penalty)
    assert [each[:2] for each in seen].count(("0", "cotangent")) == 1


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_operations_are_told_by_module_with_the_dtype_they_ran_in(policy: str) -> None:
    class Head(nn.Module):
        def forward(self, x: Any) -> Any:
            return functional.softmax(x, -1) if policy == "float32" else functional.softmax(x.double(), -1).bfloat16()

    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.MultiheadAttention(3, 1), Head())
    model.forward = lambda x: model[3](model[2](*[model[1](model[0](x))] * 3)[0])  # type: ignore[method-assign]
    _, watched = seen_of(model, RECIPE.replace(policy=policy))
    rows = {(row.module, row.name): (row.dtype, row.rule, row.count) for row in watched.operations}
    narrow = "float32" if policy == "float32" else "bfloat16"
    assert rows["0", "linear"] == (narrow, "compute", 1)
    assert rows["1", "layer_norm"] == ("float32", "normalisation", 1)
    assert rows["2", "linear"] == (narrow, "compute", 4)
    assert rows["2", "softmax"] == ("float32", "softmax", 1)
    assert rows["3", "softmax"] == ("float32" if policy == "float32" else "float64", "softmax", 1)
    assert rows["", "mean"] == ("float32", "sums", 1)
    assert not {name for _, name in rows} & {"transpose", "to", "view", "float"}
    state, _ = polyamp.train_step(loss_fn, RECIPE)(polyamp.init(model, RECIPE), X)
    assert OBSERVER.capture_pass(state, loss_fn, X, lambda *each: None).operations == ()
