"""Plain functions: names and shapes alone say what the arrays are."""

from __future__ import annotations

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyamp.errors import ModelError
from polyamp_jax.porting.converter import CONVERTER


def apply(params: Any, x: Any, rng: Any) -> Any:
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x


def kinds(params: Any) -> dict[str, list[tuple[str, dict[str, tuple[int, ...]]]]]:
    """Path of a layer -> (kind, shapes of the canonical arrays) of each form."""
    return {
        layer.path: [(form.kind, form.shapes(layer.arrays)) for form in layer.forms]
        for layer in CONVERTER.inventory((apply, params)).layers
    }


def zeros(*shape: int) -> Any:
    return jnp.zeros(shape)


def test_a_bias_says_which_axis_of_a_kernel_are_its_features() -> None:
    found = kinds([{"w": zeros(3, 5), "b": zeros(5)}, {"w": zeros(2, 5), "b": zeros(2)}])
    assert found["0"] == [("dense", {"kernel": (3, 5), "bias": (5,)})]
    assert found["1"] == [("dense", {"kernel": (5, 2), "bias": (2,)})]


def test_a_square_kernel_may_lie_both_ways() -> None:
    params = {"head": {"W": jnp.arange(4.0).reshape(2, 2), "b": zeros(2)}}
    (layer,) = CONVERTER.inventory((apply, params)).layers
    one, other = (np.asarray(form.arrays(layer.arrays)["kernel"]) for form in layer.forms)
    np.testing.assert_array_equal(one, other.T)
    assert [form.kind for form in layer.forms] == ["dense", "dense"]


def test_the_spellings_of_a_layer() -> None:
    found = kinds(
        {
            "mlp": [(zeros(4, 3), zeros(4))],
            "flat": {"w1": zeros(3, 5), "b1": zeros(5), "w2": zeros(5, 2), "b2": zeros(2)},
            "named": {"fc_w": zeros(3, 5), "fc_b": zeros(5)},
            "ln": {"scale": zeros(4), "bias": zeros(4)},
            "rms": {"scale": zeros(4)},
            "wte": zeros(9, 4),
            "cls": zeros(1, 1, 4),
            "conv": {"kernel": zeros(3, 3, 2, 5), "bias": zeros(5)},
            "conv_first": {"weight": zeros(5, 2, 3, 3), "bias": zeros(5)},
        }
    )
    assert found["mlp/0"] == [("dense", {"kernel": (3, 4), "bias": (4,)})]
    assert [found[f"flat/{n}"][0][1]["kernel"] for n in (1, 2)] == [(3, 5), (5, 2)]
    assert found["named/fc"][0] == ("dense", {"kernel": (3, 5), "bias": (5,)})
    assert found["ln"][0] == ("layer_norm", {"scale": (4,), "bias": (4,)})
    assert [kind for kind, _ in found["rms"]] == ["rms_norm", "layer_norm", "group_norm", "parameter"]
    assert [kind for kind, _ in found["wte"]] == ["embedding", "parameter"]
    assert found["cls"] == [("parameter", {"value": (1, 1, 4)})]
    assert found["conv"] == [("conv", {"kernel": (3, 3, 2, 5), "bias": (5,)})]
    assert found["conv_first"] == [("conv", {"kernel": (3, 3, 2, 5), "bias": (5,)})]


def test_every_array_stands_in_one_layer_or_is_left() -> None:
    params = {"a": {"w": zeros(2, 3), "step": jnp.arange(3)}, "t": zeros(), "seed": jax.random.key(0), "rate": 0.1}
    inventory = CONVERTER.inventory((apply, params))
    assert [leaf.name for layer in inventory.layers for leaf in layer.leaves.values()] == ["a/w", "t"]
    assert sorted(inventory.left) == ["a/step", "rate", "seed"]
    assert not inventory.ordered


def test_fill_and_evaluate() -> None:
    params = [{"w": jnp.ones((3, 2)), "b": zeros(2)}, {"w": jnp.ones((2, 2), jnp.bfloat16), "b": zeros(2)}]
    inventory = CONVERTER.inventory((apply, params))
    leaves = {leaf.name: leaf.array for layer in inventory.layers for leaf in layer.leaves.values()}
    shapes = jax.eval_shape(lambda: params)
    function, filled = CONVERTER.fill((apply, shapes), leaves)
    assert function is apply
    for one, other in zip(jax.tree.leaves(filled), jax.tree.leaves(params), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    x = np.ones((1, 3), np.float32)
    found = CONVERTER.evaluate((apply, params), x, lambda outputs: [np.ones_like(output) for output in outputs])
    np.testing.assert_allclose(found.outputs[0], np.tanh(2 * np.tanh([[3.0, 3.0]])), rtol=1e-6)
    assert sorted(found.gradients) == ["0/b", "0/w", "1/b", "1/w"]
    assert found.gradients["1/w"].dtype == np.float32


def test_half_a_model_is_refused() -> None:
    transformed = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(2)(x)))
    with pytest.raises(ModelError, match="haiku model as"):
        CONVERTER.inventory(transformed)
    with pytest.raises(ModelError, match="params must be a pytree of arrays"):
        CONVERTER.inventory((apply, {}))
