"""`polyamp.compare` of Keras models on JAX: beside a module of flax, and a module of torch in a process of its own; and
what a monitor reads of their layers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import pytest
from flax import nnx
from keras import layers

import polyamp
from polyamp.errors import ArgumentError
from tests.backends.keras.test_port import glorot

sys.path.append(str(Path(__file__).parents[2] / "fixtures"))

import operation_programs as programs

X = 0.1 * np.random.default_rng(0).standard_normal((16, 32), np.float32)
BATCH = {"x": X, "y": np.arange(16) % 10}
RECIPE = polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.adamw(1e-2), clip_norm=1.0)


class FlaxNet(nnx.Module):  # type: ignore[misc]  # flax is untyped
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.norm, self.hidden = nnx.LayerNorm(32, epsilon=1e-6, rngs=rngs), nnx.Linear(32, 64, rngs=rngs)
        self.drop, self.head = nnx.Dropout(0.3, rngs=rngs), nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.drop(jax.nn.relu(self.hidden(self.norm(x)))))


def keras_net(epsilon: float = 1e-6) -> Any:
    hidden = layers.Dense(64, "relu", name="hidden", kernel_initializer=glorot(0))
    norm, head = layers.LayerNormalization(epsilon=epsilon, name="norm"), layers.Dense(10, name="head")
    return keras.Sequential([keras.Input((32,)), norm, hidden, layers.Dropout(0.3, seed=3), head])


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"])


def test_a_training_beside_a_module_agrees_and_leaves_the_model_as_it_was() -> None:
    model = keras_net()
    before = [np.array(variable) for variable in model.variables]
    report = polyamp.compare(model, FlaxNet(), BATCH, loss_fn, RECIPE, steps=2)
    assert report.agrees, str(report)
    assert report.phases == ["float32", "float64", "mixed_bfloat16"]
    for variable, values in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, values)
        assert variable.value.dtype == values.dtype
    assert {layer.dtype_policy.name for layer in model.layers} == {"float32"}


def test_a_fault_is_found_at_its_layer() -> None:
    report = polyamp.compare(FlaxNet(), keras_net(epsilon=1e-2), X)
    assert not report.agrees
    assert "epsilon is 0.01, in the source (norm) 1e-06" in str(report)
    assert ", norm (" in str(report).splitlines()[0]


def test_beside_torch_in_a_process_of_its_own(tmp_path: Path) -> None:
    """The operation is found with its line; that of Keras's side is the user's, not Keras's own."""
    sides = {"torch": programs.in_torch, "keras": programs.in_keras}
    report = polyamp.parity.run(sides, data=programs.batch(), out=tmp_path)
    assert report.failures == []
    assert report.first is not None
    assert (report.first.stage, report.first.module, report.first.what) == ("forward", "head", "input")
    codes = [site.code for site in report.first.sites.values()]
    assert codes == ["mixed = mixed * torch.rsqrt(variance + epsilon)", "square = square + 1e-3"]
    assert report.first.sites["keras"].operation == "add", "JAX's name of it"


def test_s35_outputs_are_judged_by_layer() -> None:
    """Those of `hidden` are within bfloat16, and of `norm` in float32; a path that is no layer is refused."""
    model, monitor = keras_net(), polyamp.Monitor(1, activations=["norm", "hidden"])
    state = polyamp.init(model, RECIPE)
    state, _ = polyamp.train_step(loss_fn, RECIPE, monitor=monitor)(state, BATCH)
    found = {each.module: each.activations for each in monitor.records[0].modules if each.activations is not None}
    norm = np.array(model.get_layer("norm")(X))
    assert set(found) == {"norm", "hidden"}
    assert found["norm"].largest == pytest.approx(np.abs(norm).max(), rel=1e-2)
    assert found["hidden"].zero > 0.2, "what relu makes"
    wrong = polyamp.Monitor(1, activations="nowhere")
    with pytest.raises(ArgumentError, match=r"They are: .*'norm', 'hidden'"):
        polyamp.train_step(loss_fn, RECIPE, monitor=wrong)(state, BATCH)
