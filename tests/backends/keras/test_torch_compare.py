"""`polyamp.compare` of Keras models on torch with modules of torch, in one process."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers
from torch import nn

import polyamp
from polyamp_keras.observe.model_copy import train_in_place
from tests.backends.keras.test_port import glorot

X = 0.1 * np.random.default_rng(0).standard_normal((16, 32), np.float32)
BATCH = {"x": X, "y": np.arange(16) % 10}
RECIPE = polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.adamw(1e-2), clip_norm=1.0)


class TorchNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.hidden = nn.LayerNorm(32, eps=1e-6), nn.Linear(32, 64)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(64, 10)

    def forward(self, x: Any) -> Any:
        return self.head(self.drop(torch.relu(self.hidden(self.norm(x)))))


def keras_net(epsilon: float = 1e-6, activation: str = "relu", *, drops: bool = True) -> Any:
    dropout = [layers.Dropout(0.3, seed=3)] if drops else []
    hidden = layers.Dense(64, activation, name="hidden", kernel_initializer=glorot(0))
    norm, head = layers.LayerNormalization(epsilon=epsilon, name="norm"), layers.Dense(10, name="head")
    return keras.Sequential([keras.Input((32,)), norm, hidden, *dropout, head])


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"])


def test_a_training_beside_a_module_agrees_and_leaves_the_model_as_it_was() -> None:
    model = keras_net()
    before = [np.array(keras.ops.convert_to_numpy(variable)) for variable in model.variables]
    report = polyamp.compare(model, TorchNet(), BATCH, loss_fn, RECIPE, steps=2)
    assert report.agrees, str(report)
    assert report.phases == ["float32", "float64", "mixed_bfloat16"]
    for variable, values in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), values)
    assert {layer.dtype_policy.name for layer in model.layers} == {"float32"}


FAULTS = {
    "epsilon": (lambda: keras_net(epsilon=1e-2), "norm", "epsilon"),
    "activation": (lambda: keras_net(activation="gelu"), "head", "gelu"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_at_its_layer(name: str) -> None:
    build, place, word = FAULTS[name]
    report = polyamp.compare(TorchNet(), build(), X)
    assert not report.agrees
    assert word in str(report)
    assert f", {place} (" in str(report).splitlines()[0]


def test_dropout_of_one_side_alone_is_noted() -> None:
    report = polyamp.compare(TorchNet(), keras_net(drops=False), BATCH, loss_fn, RECIPE)
    assert report.agrees
    assert "dropout was off: 1 call in torch a and 0 calls in torch b" in str(report)


def test_a_float64_run_is_one_in_every_operation() -> None:
    model = keras_net(drops=False)
    narrow = keras.ops.convert_to_numpy(model.get_layer("norm")(X)).astype(np.float64)
    with train_in_place(model, wide=True, inference=True):
        wide = keras.ops.convert_to_numpy(model.get_layer("norm")(X.astype(np.float64)))
    assert wide.dtype == np.float64
    assert 0.0 < np.abs(wide - narrow).max() < 1e-5
    assert keras.backend.result_type("float64", "float32") == "float32"
