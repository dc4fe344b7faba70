"""Layers with a model of the framework itself inside stay in float32: `TorchModuleWrapper`, `JaxLayer`, `FlaxLayer`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import polyamp
import polyamp_keras
from polyamp.errors import UnsupportedError
from tests.backends.keras.test_fit import RECIPE

HALF = polyamp.Policy("mixed_bfloat16")


def foreign_layers(backend: str) -> list[Any]:
    """Layers with a model of the framework itself inside."""
    if backend == "torch":
        import torch

        return [keras.layers.TorchModuleWrapper(torch.nn.Linear(4, 4), name="inner")]
    import flax.linen
    import jax.numpy as jnp

    def multiply(params: Any, inputs: Any) -> Any:
        return inputs @ params

    return [
        keras.layers.JaxLayer(multiply, params=jnp.eye(4), name="inner"),
        keras.layers.FlaxLayer(flax.linen.Dense(4), name="inner"),
    ]


def test_layers_with_the_frameworks_own_code_stay_in_float32(backend: str) -> None:
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    for layer in foreign_layers(backend):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, name="first"), layer])
        kind = type(layer).__name__
        message = rf"layer 'inner' is a {kind}: .*Keep it in float32: Policy\(.*'inner': 'float32'"
        with pytest.raises(UnsupportedError, match=message):
            polyamp_keras.compile(
                model, RECIPE.replace(policy=HALF.replace(overrides={"inner": "bfloat16"})), loss="mse"
            )
        assert model.get_layer("first").compute_dtype == "float32"
        policy = HALF.replace(overrides={"inner": "float32"})
        polyamp_keras.compile(model, RECIPE.replace(policy=policy), loss="mse")
        before = [np.asarray(each) for each in model.get_weights()]
        model.fit(x, x, verbose=0)
        assert model.get_layer("first").compute_dtype == "bfloat16"
        assert not any(map(np.array_equal, before, model.get_weights()))
