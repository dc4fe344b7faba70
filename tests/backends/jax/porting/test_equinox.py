"""equinox: what needs more than the fields of a layer: states, stacks, shared arrays, modules of the user's own."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equinox import nn

from polyamp.errors import ModelError, PortError
from polyamp.porting.layouts.canonical_model import to_canonical
from polyamp_jax.porting.converter import CONVERTER
from tests.porting.layers import formulas
from tests.porting.layers.equinox_layers import randomised, run

KEY = jax.random.key(0)


def exported(model: Any) -> dict[str, Any]:
    """Leaf -> values, by way of the canonical arrays."""
    found = {}
    for layer in CONVERTER.inventory(model).layers:
        form = layer.forms[0]
        for name, array in form.leaves(form.arrays(layer.arrays), layer.arrays).items():
            if layer.leaves[name].tied is None:
                assert layer.leaves[name].name not in found
                found[layer.leaves[name].name] = array
    return found


def filled_again(model: Any) -> Any:
    """A model of NaNs that is given what the model exports: what is in no layer stays NaN."""

    def lost(leaf: Any) -> Any:
        return leaf * jnp.nan if eqx.is_inexact_array(leaf) else leaf

    return CONVERTER.fill(jax.tree.map(lost, model), exported(model))


def assert_same(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for first, second in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if eqx.is_inexact_array(first):
            np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    "layer",
    [
        nn.ConvTranspose1d(4, 6, 3, 2, padding=1, output_padding=1, groups=2, key=KEY),
        nn.ConvTranspose1d(4, 6, 4, 3, padding="SAME", dilation=2, key=KEY),
        nn.ConvTranspose1d(4, 6, 2, 3, padding="SAME_LOWER", key=KEY),
        nn.ConvTranspose1d(4, 6, 3, 3, padding=((0, 2),), output_padding=2, key=KEY),
        nn.Conv1d(4, 6, 4, padding="SAME_LOWER", key=KEY),
        nn.Conv1d(4, 6, 3, padding=((2, 0),), padding_mode="replicate", key=KEY),
        nn.Conv1d(4, 6, 3, padding="SAME", padding_mode="circular", groups=2, key=KEY),
        nn.GroupNorm(2, 4, channelwise_affine=False),
    ],
    ids=lambda layer: f"{type(layer).__name__}-{getattr(layer, 'padding', '')}",
)
def test_paddings_and_groups(layer: Any) -> None:
    layer = randomised(layer, "layer")
    x = np.random.default_rng(0).standard_normal((2, 7, 4)).astype(np.float32)
    (found,) = to_canonical(CONVERTER.inventory(layer)).values()
    np.testing.assert_allclose(run(layer, x), formulas.one(found, x), rtol=1e-5, atol=1e-5)
    assert_same(filled_again(layer), layer)


class Normed(eqx.Module):
    norm: nn.BatchNorm

    def __init__(self, mode: Any) -> None:
        self.norm = nn.BatchNorm(3, "batch", momentum=0.9, mode=mode)

    def __call__(self, x: Any, state: Any) -> Any:
        return self.norm(x, state)


def trained(model: Any, steps: int, inference: bool = False) -> Any:
    module, state = model
    module = nn.inference_mode(module, inference)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((8, 3, 2)), jnp.float32) * 2 + 1
    mapped = jax.vmap(module, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    output = x
    for _ in range(steps):
        output, state = mapped(x, state)
    return output, (module, state)


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_running_statistics_are_those_of_inference_and_are_not_corrected_again(mode: str) -> None:
    model = trained(nn.make_with_state(Normed)(mode), 3)[1]
    ours = {name: np.asarray(array) for name, array in exported(model).items()}
    assert list(ours) == ["norm/weight", "norm/bias", "norm/mean", "norm/variance"]
    target = CONVERTER.fill(nn.make_with_state(Normed)(mode), exported(model))
    np.testing.assert_array_equal(trained(target, 1, True)[0], trained(model, 1, True)[0])
    np.testing.assert_array_equal(exported(target)["norm/mean"], ours["norm/mean"])
    left = CONVERTER.inventory(model).left
    assert list(left) == ["norm/batch_counter" if mode == "batch" else "norm/ema_first_time"]
    # one step further the average has moved on by a tenth, from where it was
    batch = np.asarray(jnp.mean(jnp.asarray(trained(model, 0)[0]), (0, 2)))
    moved = np.asarray(exported(trained(target, 1)[1])["norm/mean"])
    np.testing.assert_allclose(moved, 0.9 * ours["norm/mean"] + 0.1 * batch, rtol=1e-5)


def test_a_module_with_a_state_is_passed_with_it() -> None:
    module, _ = nn.make_with_state(Normed)("batch")
    with pytest.raises(ModelError, match=r"keeps a state at 'norm': pass the model as \(module, state\)"):
        CONVERTER.inventory(module)
    raw = Normed("batch")  # not made with make_with_state: the statistics lie in the module
    assert_same(filled_again(raw), raw)


def test_spectral_norm_is_refused_by_name() -> None:
    layer = nn.SpectralNorm(nn.Linear(3, 2, key=KEY), "weight", key=KEY)
    with pytest.raises(PortError, match="SpectralNorm at the root computes the weight"):
        CONVERTER.inventory(layer)


class Tied(eqx.Module):
    shared: nn.Shared

    def __init__(self, turned: bool) -> None:
        embedding, head = nn.Embedding(5, 3, key=KEY), nn.Linear(3, 5, key=KEY)
        if turned:
            head = eqx.tree_at(lambda linear: linear.weight, nn.Linear(5, 3, key=KEY), jnp.zeros((3, 5)))
        get = (lambda pair: pair[0].weight.T) if turned else (lambda pair: pair[0].weight)
        self.shared = nn.Shared((embedding, head), lambda pair: pair[1].weight, get)


@pytest.mark.parametrize("turned", [False, True])
def test_what_is_shared_is_tied(turned: bool) -> None:
    model = Tied(turned)
    embedding, head = CONVERTER.inventory(model).layers
    assert [layer.path for layer in (embedding, head)] == ["shared/pytree/0", "shared/pytree/1"]
    assert head.leaves["weight"].tied == embedding.leaves["weight"].name == "shared/pytree/0/weight"
    table = np.asarray(embedding.forms[0].arrays(embedding.arrays)["table"])
    kernel = np.asarray(head.forms[0].arrays(head.arrays)["kernel"])
    np.testing.assert_array_equal(kernel, table if turned else table.T)
    assert_same(filled_again(model), model)
    shapes = eqx.filter_eval_shape(lambda: model)
    assert CONVERTER.inventory(shapes).layers[1].leaves["weight"].array.shape == kernel.shape[::-1]


class Block(eqx.Module):
    norm: nn.LayerNorm
    linear: nn.Linear

    def __init__(self, key: Any) -> None:
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4, key=key)


class Encoder(eqx.Module):
    blocks: Block
    head: nn.Linear

    def __init__(self) -> None:
        self.blocks = eqx.filter_vmap(Block)(jax.random.split(KEY, 3))
        self.head = nn.Linear(4, 2, key=KEY)

    def __call__(self, x: Any) -> Any:
        def one(x: Any, block: Any) -> Any:
            return x + block.linear(block.norm(x)), None

        return self.head(jax.lax.scan(one, x, self.blocks)[0])


def test_a_stack_that_vmap_made_is_one_layer_for_each_index() -> None:
    model = Encoder()
    layers = CONVERTER.inventory(model).layers
    assert [layer.path for layer in layers][:3] == ["blocks/0/norm", "blocks/0/linear", "blocks/1/norm"]
    kernel = layers[3].forms[0].arrays(layers[3].arrays)["kernel"]
    np.testing.assert_array_equal(np.asarray(kernel), model.blocks.linear.weight[1].T)
    assert_same(filled_again(model), model)
    x = np.ones((2, 4), np.float32)
    found = CONVERTER.evaluate(model, x, lambda outputs: [np.ones_like(output) for output in outputs])
    np.testing.assert_allclose(found.outputs[0], jax.vmap(model)(x), rtol=1e-5)
    assert found.gradients["blocks/2/linear/weight"].shape == (4, 4)


def test_an_mlp_gives_its_layers_their_activations() -> None:
    for scan in (False, True):
        model = nn.MLP(3, 2, 5, 3, jax.nn.gelu, jax.nn.sigmoid, scan=scan, key=KEY)
        layers = CONVERTER.inventory(model).layers
        assert [layer.path for layer in layers] == [f"layers/{number}" for number in range(4)]
        said = [layer.forms[0].attributes["activation"] for layer in layers]
        assert said == ["gelu_tanh", "gelu_tanh", "gelu_tanh", "sigmoid"]
        assert_same(filled_again(model), model)
    learnt = nn.MLP(3, 2, 5, 1, nn.PReLU(), key=KEY)
    *_, slope = CONVERTER.inventory(learnt).layers
    assert (slope.path, slope.forms[0].shapes(slope.arrays)) == ("activation/0", {"slope": (5,)})
    assert_same(filled_again(learnt), learnt)


class Own(eqx.Module):
    weight: Any
    bias: Any
    steps: Any
    inner: dict[str, Any]
    rate: float = 0.5


def test_modules_of_the_users_own() -> None:
    inner = {"scale": jnp.ones(3), "layers": [nn.Linear(3, 3, key=KEY)], "table": np.ones(2, np.float32)}
    model = Own(jnp.ones((2, 3)), jnp.ones(2), jnp.arange(2), inner)
    inventory = CONVERTER.inventory(model)
    found = {layer.path: [form.kind for form in layer.forms] for layer in inventory.layers}
    assert found == {
        "": ["dense"],
        "inner/layers/0": ["dense"],
        "inner/scale": ["parameter"],
        "inner/table": ["parameter"],
    }
    assert list(inventory.layers[0].leaves) == ["weight", "bias"]
    assert list(inventory.left) == ["steps"]
    assert_same(filled_again(model), model)


def test_layers_without_arrays_say_what_they_do() -> None:
    layers = [
        nn.Lambda(lambda x: jax.nn.gelu(x, approximate=False)),
        nn.MaxPool2d(2, 2),
        nn.AvgPool2d(3, 1, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Dropout(0.1),
        nn.RotaryPositionalEmbedding(8),
        nn.Identity(),
    ]
    found = CONVERTER.inventory(nn.Sequential(layers)).layers
    assert [(layer.forms[0].kind, dict(layer.forms[0].attributes)) for layer in found] == [
        ("activation", {"activation": "gelu"}),
        ("pooling", {"operation": "max", "window": [2, 2], "strides": [2, 2], "padding": "valid"}),
        (
            "pooling",
            {
                "operation": "average",
                "window": [3, 3],
                "strides": [1, 1],
                "padding": [[1, 1], [1, 1]],
                "counts_padding": True,
            },
        ),
        ("pooling", {"operation": "average", "window": []}),
        ("dropout", {"rate": 0.1}),
        ("rotary", {"base": 10000.0, "pairs": "halves"}),
    ]
    assert found[4].lines["rate"](0.2) == "eqx.nn.Dropout(..., p=0.2)  # at layers/4"


def test_a_target_may_be_shapes_and_a_source_may_not() -> None:
    model = randomised(nn.Linear(3, 2, key=KEY), "linear")
    shapes = eqx.filter_eval_shape(lambda: model)
    assert_same(CONVERTER.fill(shapes, exported(model)), model)
    with pytest.raises(PortError, match="'weight' is a shape without values"):
        np.asarray(CONVERTER.inventory(shapes).layers[0].arrays["weight"])
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = jax.device_put(model, sharding)
    assert CONVERTER.fill(placed, exported(model)).weight.sharding == sharding
    assert CONVERTER.fill(placed, exported(model)).weight.committed


def test_attention_of_other_sizes_and_a_model_that_takes_whole_batches() -> None:
    model = randomised(nn.MultiheadAttention(2, 6, 5, 4, 7, 3, 2, use_key_bias=True, key=KEY), "attention")
    (layer,) = CONVERTER.inventory(model).layers
    assert layer.forms[0].shapes(layer.arrays) == {
        "query_kernel": (6, 2, 3),
        "key_kernel": (5, 2, 3),
        "key_bias": (2, 3),
        "value_kernel": (4, 2, 2),
        "output_kernel": (2, 2, 7),
    }
    assert_same(filled_again(model), model)
    batch = tuple(np.ones((2, 3, size), np.float32) for size in (6, 5, 4))
    found = CONVERTER.evaluate(model, batch, lambda outputs: [np.ones_like(output) for output in outputs])
    np.testing.assert_allclose(found.outputs[0], jax.vmap(model)(*batch), rtol=1e-5)
    assert list(found.modules)[-1] == "output_proj"
    assert found.modules["output_proj"].shape == (2, 3, 7)
    whole = nn.Lambda(lambda x: x.sum((0, 1)))
    made = CONVERTER.evaluate(whole, np.ones((2, 3), np.float32), lambda outputs: outputs)
    np.testing.assert_array_equal(made.outputs[0], 6)


class Attending(eqx.Module):
    norms: list[nn.LayerNorm]
    attention: nn.MultiheadAttention
    first: nn.Linear
    second: nn.Linear
    dropout: nn.Dropout

    def __init__(self, key: Any) -> None:
        self.norms = [nn.LayerNorm(4), nn.LayerNorm(4)]
        self.attention = nn.MultiheadAttention(2, 4, key=key)
        self.first, self.second = nn.Linear(4, 8, key=key), nn.Linear(8, 4, key=key)
        self.dropout = nn.Dropout(0.1)

    def __call__(self, x: Any, key: Any) -> Any:
        y = jax.vmap(self.norms[0])(x)
        x = x + self.dropout(self.attention(y, y, y), key=key)
        y = jax.nn.gelu(jax.vmap(self.first)(jax.vmap(self.norms[1])(x)))
        return x + self.dropout(jax.vmap(self.second)(y), key=key)


class Vision(eqx.Module):
    """As equinox's own example of a vision transformer is put together."""

    patches: nn.Linear
    positions: Any
    cls_token: Any
    blocks: list[Attending]
    mlp: nn.Sequential

    def __init__(self) -> None:
        self.patches = nn.Linear(6, 4, key=KEY)
        self.positions, self.cls_token = jnp.ones((4, 4)), jnp.ones((1, 4))
        self.blocks = [Attending(key) for key in jax.random.split(KEY, 2)]
        self.mlp = nn.Sequential([nn.LayerNorm(4), nn.Linear(4, 3, key=KEY)])

    def __call__(self, x: Any, *, key: Any) -> Any:
        x = jnp.concatenate([self.cls_token, jax.vmap(self.patches)(x)]) + self.positions
        for block in self.blocks:
            x = block(x, key)
        return self.mlp(x[0])


def test_a_vision_transformer_that_must_be_given_a_key() -> None:
    model = randomised(Vision(), "vision")
    inventory = CONVERTER.inventory(model)
    arrays = [leaf for leaf in jax.tree.leaves(model) if eqx.is_array(leaf)]
    assert len([name for layer in inventory.layers for name in layer.leaves]) == len(arrays)
    assert inventory.left == {}
    assert_same(filled_again(model), model)
    x = np.ones((2, 3, 6), np.float32)
    found = CONVERTER.evaluate(model, x, lambda outputs: [np.ones_like(output) for output in outputs])
    still = nn.inference_mode(model)
    np.testing.assert_allclose(found.outputs[0], jax.vmap(lambda x: still(x, key=KEY))(x), rtol=1e-4, atol=1e-5)
    assert found.modules["blocks/1"].shape == (2, 4, 4)
    assert found.modules["blocks/1/norms/0"].shape == (2, 4, 4)
