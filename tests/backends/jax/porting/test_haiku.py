"""haiku: what names say and a batch shows; averages; stacks; the networks that haiku brings."""

from __future__ import annotations

import functools
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyamp.errors import PortError
from polyamp.porting.layouts.canonical_model import to_canonical
from polyamp_jax.porting.converter import CONVERTER
from tests.backends.jax.porting.test_haiku_layers import moved
from tests.porting.layers import formulas

KEY = jax.random.key(0)


def made(function: Any, x: Any, **flags: Any) -> Any:
    """A model with random arrays, its state as after a step."""
    stateful = bool(flags)
    transformed = hk.without_apply_rng((hk.transform_with_state if stateful else hk.transform)(function))
    shapes = jax.eval_shape(functools.partial(transformed.init, **flags), KEY, x)
    rng = np.random.default_rng(0)

    def one(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return jnp.zeros(leaf.shape, leaf.dtype)
        return jnp.asarray(1 + rng.random(leaf.shape), leaf.dtype)

    params, state = shapes if stateful else (shapes, {})
    params = jax.tree.map(one, params)
    if not stateful:
        return transformed, params
    return transformed, (params, transformed.apply(params, jax.tree.map(one, state), x, **flags)[1])


def assert_whole(model: Any, x: Any) -> None:
    """Every array lies in one layer or is left, with a batch and without, and comes back bit for bit."""
    arrays = [leaf for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.Array)]
    for batch in (None, x):
        inventory = CONVERTER.inventory(model, batch)
        names = [leaf.name for layer in inventory.layers for leaf in layer.leaves.values()]
        assert len(set(names)) == len(names)
        lost = jax.tree.map(lambda leaf: leaf * jnp.nan if _is_float(leaf) else leaf, model)
        back = CONVERTER.fill(lost, moved(inventory, 0))
        assert len(names) + len(inventory.left) == len(arrays) or "layer_stack" in names[0]
        hidden = [number for number, (path, _) in enumerate(_flat(model)) if path.endswith(("hidden", "counter"))]
        for number, ((path, one), (_, other)) in enumerate(zip(_flat(model), _flat(back), strict=True)):
            if _is_float(one) and number not in hidden:
                np.testing.assert_array_equal(one, other, path)


def _flat(model: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(model)
    return [(jax.tree_util.keystr(keys, simple=True, separator="/"), leaf) for keys, leaf in leaves]


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


X1 = np.random.default_rng(1).standard_normal((2, 7, 4)).astype(np.float32)
X2 = np.random.default_rng(1).standard_normal((2, 8, 8, 4)).astype(np.float32)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: hk.Conv1DTranspose(6, 4, 3)(x),
        lambda x: hk.Conv1DTranspose(6, 2, 3)(x),
        lambda x: hk.Conv1DTranspose(6, 2, 3, padding="VALID")(x),
        lambda x: hk.Conv1DTranspose(6, 3, 2, padding=((1, 2),))(x),
        lambda x: hk.Conv1DTranspose(6, 3, 2, output_shape=14)(x),
        lambda x: hk.Conv1D(6, 3, padding=hk.pad.causal)(x),
        lambda x: hk.DepthwiseConv1D(2, 3, rate=2)(x),
        lambda x: hk.LayerNorm(slice(1, None), True, True)(x),
        lambda x: hk.VanillaRNN(4)(x[:, 0], x[:, 1])[0],
        lambda x: hk.GroupNorm(2)(x),
    ],
)
def test_a_batch_shows_the_settings(function: Any) -> None:
    model = made(function, X1)
    (layer,) = to_canonical(CONVERTER.inventory(model, X1)).values()
    given = np.asarray(model[0].apply(model[1], X1))
    if layer.kind == "simple_rnn":
        total = X1[:, 0] @ np.asarray(layer.arrays["input_kernel"]) + X1[:, 1] @ np.asarray(
            layer.arrays["recurrent_kernel"]
        )
        biases = np.asarray(layer.arrays["bias"]) + np.asarray(layer.arrays["recurrent_bias"])
        expected = formulas.ACTIVATIONS[layer.attributes["activation"]](total + biases)
    else:
        expected = formulas.one(layer, X1)
    np.testing.assert_allclose(given, expected, rtol=1e-4, atol=1e-4)
    assert_whole(model, X1)


def normed(x: Any, is_training: bool) -> Any:
    return hk.BatchNorm(True, True, 0.9)(x, is_training)


def test_averages_are_those_of_inference_and_are_not_corrected_again() -> None:
    x = X2 * 2 + 1
    model = made(normed, x, is_training=True)
    inventory = CONVERTER.inventory(model)
    assert sorted(inventory.left) == [
        f"batch_norm/~/{name}/{leaf}" for name in ("mean_ema", "var_ema") for leaf in ("counter", "hidden")
    ]
    zeros = jax.tree.map(lambda leaf: leaf * 0 if isinstance(leaf, jax.Array) else leaf, model)
    transformed, (params, state) = CONVERTER.fill(zeros, moved(inventory, 0))
    before = model[0].apply(*model[1], x, is_training=False)[0]
    np.testing.assert_array_equal(transformed.apply(params, state, x, is_training=False)[0], before)
    average = np.asarray(model[1][1]["batch_norm/~/mean_ema"]["average"])
    _, after = transformed.apply(params, state, x, is_training=True)
    expected = 0.9 * average + 0.1 * x.mean((0, 1, 2))
    np.testing.assert_allclose(after["batch_norm/~/mean_ema"]["average"], expected, rtol=1e-5)
    found = CONVERTER.evaluate(model, x, lambda outputs: [np.ones_like(output) for output in outputs])
    np.testing.assert_allclose(found.outputs[0], before, rtol=1e-5)
    assert list(found.modules) == ["batch_norm"]


def test_names_alone_give_forms_and_a_batch_the_one() -> None:
    def function(x: Any) -> Any:
        x = hk.MultiHeadAttention(2, 4, w_init=hk.initializers.VarianceScaling(), name="attn")(x, x, x)
        return hk.Linear(8, with_bias=False, name="out")(x), hk.get_parameter("slope", (8,), init=jnp.zeros)

    model = made(function, X1)
    found = {layer.path: layer.forms for layer in CONVERTER.inventory(model).layers}
    heads = [form.shapes(CONVERTER.inventory(model).layers[0].arrays)["query_kernel"][1] for form in found["attn"]]
    assert heads == [1, 2, 4, 8]
    assert [form.kind for form in found["~/slope"]] == ["prelu", "parameter"]
    (attention, *_) = CONVERTER.inventory(model, X1).layers
    assert attention.module == "hk.MultiHeadAttention"
    assert attention.forms[0].shapes(attention.arrays)["query_kernel"] == (4, 2, 4)
    assert_whole(model, X1)


def test_a_stack_is_one_layer_for_each_index() -> None:
    def function(x: Any) -> Any:
        return hk.experimental.layer_stack(3)(lambda x: jnp.tanh(hk.Linear(4)(x)))(x)

    model = made(function, X1)
    found = CONVERTER.inventory(model).layers
    assert [layer.path for layer in found] == [f"__layer_stack_no_per_layer/{n}/linear" for n in range(3)]
    assert_whole(model, X1)
    made_outputs = CONVERTER.evaluate(model, X1, lambda outputs: [np.ones_like(output) for output in outputs])
    np.testing.assert_allclose(made_outputs.outputs[0], model[0].apply(model[1], X1), rtol=1e-5)


def test_spectral_norm_is_refused_by_name() -> None:
    def function(x: Any, is_training: bool = True) -> Any:
        return hk.SpectralNorm()(x[0])

    model = made(function, X1, is_training=True)
    with pytest.raises(PortError, match=r"'spectral_norm' is a hk\.SpectralNorm"):
        CONVERTER.inventory(model)


def test_the_networks_that_haiku_brings() -> None:
    def resnet(x: Any, is_training: bool) -> Any:
        return hk.nets.ResNet((1, 1, 1, 1), 3, channels_per_group=(8, 8, 8, 8), bottleneck=False)(x, is_training)

    def mobilenet(x: Any, is_training: bool) -> Any:
        return hk.nets.MobileNetV1((1, 1), (8, 8), 3)(x, is_training)

    assert_whole(made(lambda x: hk.nets.MLP([5, 3])(x), X1), X1)
    for network in (resnet, mobilenet):
        model = made(network, X2, is_training=True)
        assert_whole(model, (X2, False))
        kinds = {layer.forms[0].kind for layer in CONVERTER.inventory(model, (X2, False)).layers if layer.leaves}
        assert kinds == {"conv", "batch_norm", "dense"}
