"""Products in 8 bits in Keras on each of its backends (S36): codes, products, layers, `fit`, and what is refused."""

from __future__ import annotations

from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest

import polyamp
import polyamp_keras
from polyamp import Float8, Policy, UnsupportedError
from polyamp.reference import float8 as reference
from polyamp_keras.precision.float8_products import multiply, parse_einsum, quantizer
from tests.fixtures import float8_values

POLICY = Policy("mixed_float8", float8=Float8(emulate=True))
HALF = Policy("mixed_bfloat16")
SETTINGS = (
    Float8(emulate=True),
    Float8(emulate=True, gradients="float8_e4m3fn"),
    Float8(emulate=True, scaling="row"),
    Float8(emulate=True, scaling="block32"),
)


def to_float32(tensor: Any) -> np.ndarray[Any, Any]:
    return np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(tensor, "float32")))


@pytest.mark.parametrize("form", float8_values.FORMATS)
@pytest.mark.parametrize("kind", float8_values.KINDS)
def test_s36_codes_have_the_references_bits(kind: str, form: str) -> None:
    x = float8_values.values(kind)
    want = reference.quantize(x, form)
    got = quantizer.quantize(keras.ops.convert_to_tensor(x, "bfloat16"), form)
    assert int(got.exponent) == want.exponent
    assert keras.backend.standardize_dtype(got.numbers.dtype) == form
    numbers = to_float32(got.numbers).astype(getattr(ml_dtypes, form))
    np.testing.assert_array_equal(float8_values.bits(numbers), float8_values.bits(want.numbers))


def gradients_of(backend: str, function: Any, given: list[Any], g: Any) -> tuple[Any, list[Any]]:
    """Return the result of a function of tensors, and its gradients with the cotangent `g`."""
    if backend == "tensorflow":
        import tensorflow as tf

        tensors = [tf.constant(each) for each in given]
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            out = function(*tensors)
        return out, tape.gradient(out, tensors, output_gradients=tf.cast(g, out.dtype))
    if backend == "torch":
        import torch

        tensors = [torch.from_numpy(each).requires_grad_() for each in given]
        out = function(*tensors)
        return out.detach(), list(torch.autograd.grad(out, tensors, torch.from_numpy(g).to(out.dtype)))
    import jax

    out, back = jax.vjp(function, *given)
    return out, list(back(keras.ops.cast(g, out.dtype)))


@pytest.mark.parametrize("form", float8_values.FORMATS)
def test_s36_codes_of_rows_and_blocks_have_the_references_bits(form: str) -> None:
    def codes(x: Any, form: str, scaling: str, axis: int) -> Any:
        got = quantizer.quantize(keras.ops.convert_to_tensor(x, "bfloat16"), form, scaling, axis)
        return to_float32(got.numbers).astype(getattr(ml_dtypes, form)), keras.ops.convert_to_numpy(got.exponent)

    float8_values.check_codes(codes, form)


@pytest.mark.parametrize("settings", SETTINGS, ids=repr)
def test_s36_a_product_has_the_references_numbers(backend: str, settings: Float8) -> None:
    x, w, g = float8_values.products()

    def product(x: Any, w: Any) -> Any:
        return multiply(keras.ops.cast(x, "bfloat16"), keras.ops.cast(w, "bfloat16"), settings)

    out, (dx, dw) = gradients_of(backend, product, [x, w], g)
    float8_values.check_products(to_float32(out), to_float32(dx), to_float32(dw), settings)


@pytest.mark.parametrize("value", float8_values.NOT_FINITE)
def test_s36_infinity_or_nan_in_the_gradient_alone_is_not_cut(backend: str, value: float) -> None:
    x, w, _ = float8_values.products()

    def product(x: Any, w: Any) -> Any:
        return multiply(keras.ops.cast(x, "bfloat16"), keras.ops.cast(w, "bfloat16"), SETTINGS[0])

    out, gradients = gradients_of(backend, product, [x, w], float8_values.broken_gradient(value))
    assert np.isfinite(to_float32(out)).all()
    float8_values.check_broken_gradients(*map(to_float32, gradients))


@pytest.mark.parametrize(
    ("equation", "shape", "kernel"),
    [
        ("...x,xy->...y", (2, 3, 16), (16, 32)),
        ("abc,cde->abde", (2, 3, 16), (16, 2, 8)),
        ("abcd,cde->abe", (2, 3, 4, 8), (4, 8, 16)),
        ("abc,dce->adbe", (2, 3, 16), (4, 16, 8)),
        ("ab...,bc->ac...", (2, 16, 3), (16, 32)),
    ],
)
def test_s36_an_einsum_is_that_of_the_codes(equation: str, shape: Any, kernel: Any) -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=size).astype(ml_dtypes.bfloat16).astype(np.float32) for size in (shape, kernel))
    layer = keras.layers.EinsumDense(
        equation, output_shape=np.einsum(equation, x, w).shape[-1 if equation[0] == "." else 1 :]
    )
    layer.build(x.shape)
    layer.set_weights([w])
    with polyamp_keras.apply_policy(layer, POLICY, heads=False):
        got = to_float32(layer(x))
    codes = [reference.quantize(each, "float8_e4m3fn") for each in (x, w)]
    wide = [np.ldexp(each.numbers.astype(np.float64), -each.exponent) for each in codes]
    np.testing.assert_allclose(got, np.einsum(equation, *wide), rtol=2.0**-8, atol=2.0**-20)


def test_s36_an_einsum_with_batch_axes_or_sums_is_none() -> None:
    assert parse_einsum("abc,bcd->abd") is None  # b is in both operands and in the result
    assert parse_einsum("abc,cd->ad") is None  # b is summed over
    assert parse_einsum("aa,ab->ab") is None
    assert parse_einsum("ab,c->abc") is None  # contracts nothing


def reasons(model: Any, policy: Policy = POLICY, *, heads: bool = False) -> dict[str, str]:
    with polyamp_keras.apply_policy(model, policy, heads=heads) as applied:
        return {path: why for path, (_, why) in applied.choices.items() if path}


def network(inputs: int = 16, first: int = 32, odd: int = 24, head: int = 16) -> Any:
    """Two layers and a head, by their sizes."""
    dense, seeded = keras.layers.Dense, keras.initializers.GlorotUniform(seed=0)
    return keras.Sequential(
        [
            keras.Input((inputs,)),
            dense(first, "relu", kernel_initializer=seeded, name="first"),
            dense(odd, "relu", kernel_initializer=seeded, name="odd"),
            dense(head, kernel_initializer=seeded, name="head"),
        ]
    )


def test_s36_each_dense_layer_has_its_reason() -> None:
    found = reasons(network())
    assert found == {"first": "float8", "odd": "compute (size)", "head": "compute (head)"}
    assert reasons(network(), heads=True)["head"] == "head"  # in float32
    chosen = POLICY.replace(overrides={"head": "float8", "first": "bfloat16"})
    found = reasons(network(), chosen)
    assert (found["first"], found["head"]) == ("override", "compute (size)")
    wide = keras.Sequential([keras.Input((16,)), keras.layers.Dense(16, name="head")])
    assert reasons(wide, POLICY.replace(overrides={"head": "float8"})) == {"head": "float8"}
    assert reasons(wide, POLICY.replace(op_rules={"dense": "compute"})) == {"head": "op_rules"}
    blocks = POLICY.replace(float8=SETTINGS[3], overrides={"head": "float8"})
    assert reasons(wide, blocks) == {"head": "compute (size)"}  # 16 is no multiple of 32


def test_s36_layers_that_are_no_product_with_a_parameter_say_so() -> None:
    class Doubling(keras.layers.Dense):
        def call(self, inputs: Any) -> Any:
            return 2 * super().call(inputs)

    tuned = keras.layers.Dense(16, name="tuned")
    layers = [Doubling(16, name="doubling"), keras.layers.EinsumDense("ab,bc->abc", (16, 16), name="outer"), tuned]
    model = keras.Sequential([keras.Input((16,)), *layers])
    tuned.enable_lora(2)
    assert reasons(model) == {
        "doubling": "compute (own call)",
        "outer": "compute (batch axes)",
        "tuned": "compute (no parameter)",
    }


def test_s36_attention_has_its_projections_in_8_bits() -> None:
    x = keras.Input((4, 32))
    attention = keras.layers.MultiHeadAttention(2, 16, name="attention")
    model = keras.Model(x, attention(x, x))
    found = reasons(model)
    assert {path.rpartition("/")[2]: why for path, why in found.items() if why == "float8"} == dict.fromkeys(
        ["query", "key", "value", "attention_output"], "float8"
    )


def test_s36_a_dense_layer_in_a_recurrent_cell_stays_in_16_bits() -> None:
    class Cell(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.state_size, self.dense = 16, keras.layers.Dense(16, name="dense")

        def build(self, shape: Any) -> None:
            self.dense.build(shape)

        def call(self, inputs: Any, states: Any) -> Any:
            out = self.dense(inputs) + states[0]
            return out, [out]

    found = reasons(keras.Sequential([keras.Input((3, 16)), keras.layers.RNN(Cell())]))
    assert [why for path, why in found.items() if path.endswith("/dense")] == ["compute (recurrent cell)"]


def test_s36_a_layer_without_products_in_8_bits_has_bfloat16s_bits() -> None:
    x = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
    outputs = {}
    for name, policy in (("8", POLICY), ("taken out", POLICY.replace(overrides={"first": "bfloat16"})), ("16", HALF)):
        model = network()
        with polyamp_keras.apply_policy(model, policy):
            outputs[name] = to_float32(model(x))
        assert "_polyamp_float8_call" not in vars(model.layers[0])
    np.testing.assert_array_equal(outputs["taken out"], outputs["16"])
    distance = np.abs(outputs["8"] - outputs["16"]).max() / np.abs(outputs["16"]).max()
    assert 2.0**-9 < distance < 2.0**-3


@pytest.mark.parametrize("settings", [SETTINGS[0], SETTINGS[3]], ids=repr)
def test_s36_fit_trains_as_in_bfloat16_and_skips_infinity(settings: Float8) -> None:
    """Blocks run along the batch too, whose size a graph need not know: 20 rows are one short block."""
    narrow, sizes = POLICY.replace(float8=settings), (16, 32, 24, 16) if settings == SETTINGS[0] else (32, 64, 32, 32)
    assert reasons(network(*sizes), narrow)["first"] == "float8"
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, sizes[0])).astype("float32")
    losses = {}
    for policy in (narrow, HALF):
        model = network(*sizes)
        recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.adamw(0.01), scaler=polyamp.LossScaler(init_scale=2.0))
        polyamp_keras.compile(model, recipe, loss="mse")
        losses[policy] = model.fit(x, np.cos(x), batch_size=20, epochs=8, shuffle=False, verbose=0).history["loss"]
        before = [np.asarray(each) for each in model.get_weights()]
        bad = x[:32].copy()
        bad[3, 5] = np.inf
        model.fit(bad, np.cos(x[:32]), batch_size=32, verbose=0)
        for old, new in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(new, old)
    assert losses[narrow][-1] < 0.9 * losses[narrow][0]
    assert 0 < abs(losses[narrow][-1] - losses[HALF][-1]) < 0.02 * losses[HALF][-1]


def test_s36_a_saved_model_keeps_its_products(tmp_path: Any) -> None:
    model, x = network(), np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
    polyamp_keras.apply_policy(model, POLICY.replace(overrides={"odd": "bfloat16"}))
    want = to_float32(model(x))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(to_float32(loaded(x)), want)


def test_s36_gradients_of_gradients_are_refused(backend: str) -> None:
    x, w, g = float8_values.products()

    def slope(x: Any, w: Any) -> Any:
        def total(x: Any) -> Any:
            return multiply(keras.ops.cast(x, "bfloat16"), keras.ops.cast(w, "bfloat16"), Float8(emulate=True))

        if backend == "jax":
            import jax

            return jax.vjp(total, x)[1](keras.ops.cast(g, "bfloat16"))[0]
        if backend == "torch":
            import torch

            return torch.autograd.grad(total(x).sum(), x, create_graph=True)[0]
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(x)
            out = total(x)
        return tape.gradient(out, x)

    with pytest.raises(UnsupportedError, match="have no gradients of their own"):
        gradients_of(backend, slope, [x, w], np.ones_like(x))


def test_s36_products_that_are_not_emulated_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"Keras multiplies no 8-bit floats.*Float8\(emulate=True\)"):
        polyamp_keras.apply_policy(network(), "mixed_float8")
    with pytest.raises(UnsupportedError, match="Keras multiplies no 8-bit floats"):
        polyamp_keras.compile(network(), polyamp.Recipe(policy="mixed_float8", optimizer=polyamp.sgd(0.1)), loss="mse")


def test_s36_a_keras_policy_cannot_say_it() -> None:
    with pytest.raises(UnsupportedError, match=r"which has one dtype; use apply_policy\(model, policy\)"):
        polyamp_keras.dtype_policy(POLICY)
