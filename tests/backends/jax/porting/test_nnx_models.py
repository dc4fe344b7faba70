"""nnx models: what is shared, tied or left, lines of code, evaluation as in inference, and what cannot be moved."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import polyamp
from polyamp.errors import ModelError, PortError
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp.porting.layouts.operations import Merge
from polyamp_jax.arrays import named_leaves
from polyamp_jax.models.libraries import adapt
from polyamp_jax.porting.converter import CONVERTER
from polyamp_jax.porting.libraries.nnx import arrays
from tests.porting.layers import linen_layers, nnx_layers
from tests.porting.layers.cases import inputs


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.rnn = nnx.RNN(nnx.GRUCell(4, 4, rngs=rngs), reverse=True)
        self.gain = nnx.Param(jnp.full((4,), 2.0))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.attention = nnx.MultiHeadAttention(2, 4, decode=False, normalize_qk=True, dropout_rate=0.1, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.again = self.blocks[0]
        self.blocks[1].bias = self.attention.out.bias
        self.head = nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), nnx.gelu, nnx.Linear(4, 3, rngs=rngs))

    def __call__(self, x: Any) -> Any:
        x = self.rnn(self.drop(self.norm(x))) * self.gain
        x = self.attention(x)
        for block in (*self.blocks, self.again):
            x = block(x)
        return self.head(x)


X = np.random.default_rng(0).standard_normal((2, 5, 4)).astype(np.float32)


def test_an_inventory_lists_modules_once_ties_parameters_and_what_is_left() -> None:
    model = Model(nnx.Rngs(0))
    inventory = CONVERTER.inventory(model)
    assert inventory.ordered
    assert [(layer.path, layer.forms[0].kind) for layer in inventory.layers] == [
        ("norm", "batch_norm"),
        ("drop", "dropout"),
        ("rnn/cell", "gru"),
        ("gain", "parameter"),
        ("calls", "parameter"),
        ("attention", "attention"),
        ("attention/query_ln", "layer_norm"),
        ("attention/key_ln", "layer_norm"),
        ("blocks/0", "dense"),
        ("blocks/1", "dense"),
        ("head/layers/0", "dense"),
        ("head/layers/1", "activation"),
        ("head/layers/2", "dense"),
    ]
    layers = {layer.path: layer for layer in inventory.layers}
    leaves = [leaf for layer in inventory.layers for leaf in layer.leaves.values()]
    assert len({leaf.name for leaf in leaves}) == len(leaves)
    assert [(leaf.name, leaf.tied) for leaf in leaves if leaf.tied] == [("blocks/1/bias", "attention/out/bias")]
    own = {leaf.name for leaf in leaves if leaf.tied is None}
    assert own == set(arrays(model))
    assert {leaf.name for leaf in leaves if leaf.trainable and leaf.tied is None} == set(
        named_leaves(adapt(model).params)
    )
    assert {name.partition("/rngs/")[0]: why for name, why in inventory.left.items()} == {
        "attention": "a random stream",
        "drop": "a random stream",
        "rnn": "a random stream",
    }
    said = {path: dict(layer.forms[0].attributes) for path, layer in layers.items()}
    assert said["rnn/cell"]["reverse"] is True
    assert said["head/layers/1"] == {"activation": "gelu_tanh"}
    assert said["attention"] == {"dropout": 0.1, "scale": 2**-0.5, "mask": "keep"}
    assert layers["norm"].lines["momentum"](0.9) == "model.norm.momentum = 0.9"
    assert layers["drop"].lines["rate"](0.1) == "model.drop.rate = 0.1"


def test_fill_makes_a_new_module_of_the_same_structure() -> None:
    model = Model(nnx.Rngs(0))
    before = {name: np.array(values) for name, values in arrays(model).items()}
    target = nnx.eval_shape(lambda: Model(nnx.Rngs(1)))
    assert not CONVERTER.inventory(target).ordered
    with pytest.raises(ModelError, match=r"'gain' is a jax.ShapeDtypeStruct|have no values yet"):
        CONVERTER.evaluate(target, X, lambda outputs: outputs)
    filled = CONVERTER.fill(model, {name: Lazy.of(values + 1) for name, values in before.items()})
    assert filled is not model
    assert nnx.graphdef(filled) == nnx.graphdef(model)
    assert filled.again is filled.blocks[0]
    assert filled.blocks[1].bias is filled.attention.out.bias
    for name, values in arrays(filled).items():
        np.testing.assert_array_equal(values, before[name] + 1)
        np.testing.assert_array_equal(arrays(model)[name], before[name])


def test_evaluate_is_as_in_inference_and_changes_nothing() -> None:
    model = Model(nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    before = jax.tree.map(lambda leaf: np.array(jax.random.key_data(leaf) if _is_key(leaf) else leaf), state)
    found = CONVERTER.evaluate(model, X, lambda outputs: [np.ones_like(output) for output in outputs])
    assert nnx.graphdef(model) == graphdef
    after = jax.tree.map(lambda leaf: np.array(jax.random.key_data(leaf) if _is_key(leaf) else leaf), nnx.state(model))
    for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(one, other)
    assert set(found.gradients) == set(named_leaves(adapt(model).params))
    still = nnx.clone(model)
    still.eval()

    @nnx.jit
    def gradient_of(module: Any) -> Any:
        def total(module: Any) -> Any:
            outputs = module(jnp.asarray(X))
            return outputs.sum(), outputs

        return nnx.grad(total, has_aux=True)(module)

    expected, outputs = gradient_of(still)
    np.testing.assert_allclose(found.outputs[0], outputs, rtol=1e-5, atol=1e-6)
    for name, gradient in named_leaves(nnx.to_pure_dict(expected)).items():
        np.testing.assert_allclose(found.gradients[name], gradient, rtol=1e-4, atol=1e-5)
    assert list(found.modules)[:4] == ["norm", "drop", "rnn/cell", "rnn"]
    np.testing.assert_array_equal(found.modules["norm"], found.modules["drop"])


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def test_a_recurrent_bias_that_nnx_gru_cannot_hold_is_refused() -> None:
    (layer,) = CONVERTER.inventory(nnx.RNN(nnx.GRUCell(3, 2, rngs=nnx.Rngs(0)))).layers
    arrays = {name: Lazy.of(np.array(lazy)) for name, lazy in layer.forms[0].arrays(layer.arrays).items()}
    allowed = {**arrays, "recurrent_bias": Lazy.of(np.array([1, 2, 3, 4, 0, 0], np.float32))}
    made = layer.forms[0].leaves(allowed, layer.arrays)
    np.testing.assert_array_equal(made["dense_i/bias"].read(), arrays["bias"].read() + allowed["recurrent_bias"].read())
    assert layer.forms[0].losses(allowed) == ["two biases are added into one"]
    refused = {**arrays, "recurrent_bias": Lazy.of(np.array([0, 0, 0, 0, 0, 1], np.float32))}
    with pytest.raises(PortError, match="has no place in the target"):
        layer.forms[0].leaves(refused, layer.arrays)["dense_i/bias"].read()
    assert Merge(blocks=3, absent=(2,)).shapes([(6,)]) == [(6,), (6,)]


def test_linens_gru_without_a_candidates_recurrent_bias_goes_to_nnx_and_passes_the_check() -> None:
    module, variables = linen_layers.BUILD["gru"]()
    hidden = variables["params"]["cell"]["hn"]
    hidden["bias"] = jnp.zeros_like(hidden["bias"])
    given = inputs("gru")
    filled, report = polyamp.port((module, variables), nnx_layers.BUILD["gru"](), check=given)
    np.testing.assert_allclose(filled(given), linen_layers.run((module, variables), given), rtol=1e-5, atol=1e-6)
    assert report.checked is not None


RNGS = nnx.Rngs(0)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: nnx.LoRALinear(3, 2, lora_rank=1, rngs=RNGS), "LoRALinear: it adds a product"),
        (lambda: nnx.WeightNorm(nnx.Linear(3, 2, rngs=RNGS), rngs=RNGS), "WeightNorm: it computes"),
        (lambda: nnx.SpectralNorm(nnx.Linear(3, 2, rngs=RNGS), rngs=RNGS), "SpectralNorm: it divides"),
        (lambda: nnx.MultiHeadAttention(2, 4, decode=True, rngs=RNGS), "decode=True"),
        (lambda: nnx.Conv(2, 2, (2,), input_dilation=2, rngs=RNGS), "input_dilation="),
        (
            lambda: nnx.vmap(lambda key: nnx.Linear(3, 2, rngs=nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 3)),
            "a stack of layers",
        ),
        (lambda: nnx.LinearGeneral((3,), (2,), batch_axis={0: 4}, rngs=RNGS), "batch axes"),
    ],
)
def test_what_has_no_canonical_layout_is_refused_by_name(make: Any, said: str) -> None:
    with pytest.raises(PortError, match=f"'the model' cannot be moved: flax.nnx.{said}|cannot be moved: .*{said}"):
        CONVERTER.inventory(make())


def test_a_bidirectional_layer_defined_after_its_halves_is_no_difference() -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.first, self.second = (nnx.RNN(nnx.GRUCell(3, 4, rngs=nnx.Rngs(number))) for number in range(2))
            self.both = nnx.Bidirectional(self.first, self.second)

        def __call__(self, x: Any) -> Any:
            return self.both(x)

    reverse = {layer.path: layer.forms[0].attributes.get("reverse") for layer in CONVERTER.inventory(Net()).layers}
    assert reverse == {"first/cell": False, "second/cell": True}


def test_s30_a_tied_kernel_into_an_untied_one_passes_the_check() -> None:
    class Net(nnx.Module):
        def __init__(self, seed: int, *, tied: bool) -> None:
            rngs = nnx.Rngs(seed)
            self.first, self.second = (nnx.Linear(4, 4, use_bias=False, rngs=rngs) for _ in range(2))
            if tied:
                self.second.kernel = self.first.kernel

        def __call__(self, x: Any) -> Any:
            return self.second(jnp.tanh(self.first(x)))

    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    _, report = polyamp.port(Net(0, tied=True), Net(1, tied=False), check=x)
    assert report.checked is not None
    assert report.checked.gradients["first/kernel"] < 1e-5
