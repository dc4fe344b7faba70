"""S4 in JAX: a sensitive operation on 16-bit values gives what it gives when its input is cast to float32 first."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import polyamp

ROWS, WIDTH = 4, 8
LABELS = jnp.array([0, 3, 1, 7])
TARGETS = jax.nn.softmax(jnp.asarray(np.random.default_rng(5).normal(size=(ROWS, WIDTH)), jnp.float32))
IDS = jnp.array([0, 1, 0, 1])
ULP = float(jnp.finfo(jnp.float32).eps)

Function = Callable[[Any], Any]


def softmax_by_hand(x: Any) -> Any:
    shifted = jnp.exp(x - jnp.max(x, -1, keepdims=True))
    return shifted / jnp.sum(shifted, -1, keepdims=True)


def layer_norm_by_hand(x: Any) -> Any:
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred / jnp.sqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5)


def rms_norm_by_hand(x: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-8)


def linen_layer(module: Any, **options: Any) -> Function:
    variables = module.init(jax.random.key(0), jnp.ones((ROWS, WIDTH)), **options)
    mutable = [name for name in variables if name != "params"]

    def run(x: Any) -> Any:
        return module.apply(variables, x, mutable=mutable, **options)[0]

    return run


def haiku_layer(build: Callable[[], Any], **options: Any) -> Function:
    transformed = hk.transform_with_state(lambda x: build()(x, **options))
    params, state = transformed.init(jax.random.key(0), jnp.ones((ROWS, WIDTH)))
    return lambda x: transformed.apply(params, state, None, x)[0]


def nnx_layer(build: Callable[..., Any]) -> Function:
    def run(x: Any) -> Any:
        return build(rngs=nnx.Rngs(0))(x)

    return run


def equinox_batch_norm(x: Any) -> Any:
    layer, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(WIDTH, "batch", mode="batch")
    return jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)[0]


ELEMENTWISE: dict[str, Function] = {
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "log": lambda x: jnp.log(jnp.abs(x)),
    "log1p": lambda x: jnp.log1p(jnp.abs(x)),
    "expm1": jnp.expm1,
    "power of an array": lambda x: jnp.power(jnp.abs(x), x),
    "power of a float": lambda x: jnp.power(jnp.abs(x), 1.7),
    "power of an int": lambda x: jnp.power(x, 3),
    "x ** 2": lambda x: x**2,
    "x ** 3.0": lambda x: x**3.0,
    "x * x": lambda x: x * x,
    "square": jnp.square,
    "reciprocal": jnp.reciprocal,
    "rsqrt": lambda x: jax.lax.rsqrt(jnp.abs(x)),
    "softplus": jax.nn.softplus,
    "log_sigmoid": jax.nn.log_sigmoid,
    "logaddexp": lambda x: jnp.logaddexp(x, x[::-1]),
}

REDUCTIONS: dict[str, Function] = {
    "sum": lambda x: x.sum(-1),
    "sum of all": jnp.sum,
    "mean": lambda x: x.mean(-1),
    "prod": lambda x: x.prod(-1),
    "var": lambda x: x.var(-1),
    "std": lambda x: x.std(-1),
    "cumsum": lambda x: jnp.cumsum(x, -1),
    "cumprod": lambda x: jnp.cumprod(x, -1),
    "norm": lambda x: jnp.linalg.norm(x, axis=-1),
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
    "logsumexp": lambda x: jax.nn.logsumexp(x, -1),
    "standardize": jax.nn.standardize,
    "softmax by hand": softmax_by_hand,
    "avg_pool": lambda x: linen.avg_pool(x[None, :, :, None], (2, 2), (2, 2)),
}

LAYERS: dict[str, Function] = {
    "layer norm by hand": layer_norm_by_hand,
    "rms norm by hand": rms_norm_by_hand,
    "linen.LayerNorm": linen_layer(linen.LayerNorm()),
    "linen.LayerNorm, slow variance": linen_layer(linen.LayerNorm(use_fast_variance=False)),
    "linen.RMSNorm": linen_layer(linen.RMSNorm()),
    "linen.GroupNorm": linen_layer(linen.GroupNorm(2)),
    "linen.BatchNorm": linen_layer(linen.BatchNorm(use_running_average=False)),
    "nnx.LayerNorm": nnx_layer(lambda rngs: nnx.LayerNorm(WIDTH, rngs=rngs)),
    "nnx.RMSNorm": nnx_layer(lambda rngs: nnx.RMSNorm(WIDTH, rngs=rngs)),
    "nnx.GroupNorm": nnx_layer(lambda rngs: nnx.GroupNorm(WIDTH, 2, rngs=rngs)),
    "nnx.BatchNorm": nnx_layer(lambda rngs: nnx.BatchNorm(WIDTH, rngs=rngs)),
    "eqx.nn.LayerNorm": jax.vmap(eqx.nn.LayerNorm(WIDTH)),
    "eqx.nn.RMSNorm": jax.vmap(eqx.nn.RMSNorm(WIDTH)),
    "eqx.nn.GroupNorm": jax.vmap(eqx.nn.GroupNorm(2, WIDTH)),
    "eqx.nn.BatchNorm": equinox_batch_norm,
    "hk.LayerNorm": haiku_layer(lambda: hk.LayerNorm(-1, True, True)),
    "hk.RMSNorm": haiku_layer(lambda: hk.RMSNorm(-1)),
    "hk.GroupNorm": haiku_layer(lambda: hk.GroupNorm(2)),
    "hk.BatchNorm": haiku_layer(lambda: hk.BatchNorm(True, True, 0.9), is_training=True),
}

LOSSES: dict[str, Function] = {
    "optax.softmax_cross_entropy": lambda x: optax.softmax_cross_entropy(x, TARGETS),
    "optax.softmax_cross_entropy_with_integer_labels": lambda x: optax.softmax_cross_entropy_with_integer_labels(
        x, LABELS
    ),
    "optax.sigmoid_binary_cross_entropy": lambda x: optax.sigmoid_binary_cross_entropy(x, TARGETS),
    "optax.squared_error": lambda x: optax.squared_error(x, TARGETS),
    "optax.l2_loss": lambda x: optax.l2_loss(x, TARGETS),
    "optax.huber_loss": lambda x: optax.huber_loss(x, TARGETS),
    "optax.log_cosh": lambda x: optax.log_cosh(x, TARGETS),
    "optax.cosine_similarity": lambda x: optax.cosine_similarity(x, TARGETS),
    "optax.kl_divergence": lambda x: optax.kl_divergence(jax.nn.log_softmax(x), TARGETS),
    "polyamp.losses.mean_squared_error": lambda x: polyamp.losses.mean_squared_error(x, TARGETS),
    "polyamp.losses.softmax_cross_entropy": lambda x: polyamp.losses.softmax_cross_entropy(x, LABELS),
    "polyamp.losses.sigmoid_cross_entropy": lambda x: polyamp.losses.sigmoid_cross_entropy(x, TARGETS),
    "polyamp.losses.huber": lambda x: polyamp.losses.huber(x, TARGETS),
}

SCATTERED: dict[str, Function] = {
    "segment_sum": lambda x: jax.ops.segment_sum(x, IDS, num_segments=2),
    "x.at[].add": lambda x: jnp.zeros((2, WIDTH)).at[IDS].add(x),
}

ALL = {**ELEMENTWISE, **REDUCTIONS, **LAYERS, **LOSSES, **SCATTERED}


ROUNDED = {
    "power of a float": "the program holds the exponent 1.7 as a float16 number",
    "optax.sigmoid_binary_cross_entropy": "the program casts the targets to float16",
    "eqx.nn.LayerNorm": "the layer casts its result to its input's dtype",
    "eqx.nn.RMSNorm": "the layer casts its result to its input's dtype",
    "eqx.nn.GroupNorm": "the layer casts its result to its input's dtype",
}
"""Where a program that declares float16 itself rounds to float16 by its own text: what, and why."""


def operands() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((ROWS, 6), (6, WIDTH)))
    return x, w


def on_product(function: Function, dtype: str) -> Any:
    """`function` of a product, under the policy: what a user writes."""
    return polyamp.Policy(compute=dtype, output="float32").autocast(lambda x, w: function(x @ w))


def assert_equal(name: str, found: Any, wanted: Any) -> None:
    """Bit for bit, or to 2 float32 ulps of the largest element where something is summed, or where XLA fuses several
    operations (`log_sigmoid`, in its cheapest code): XLA orders the additions of a program run by operations and of one
    compiled by jnp differently (jax 0.7; in 0.10 the results are the same)."""
    ulps = 0 if name in ELEMENTWISE and name != "log_sigmoid" else 2
    np.testing.assert_allclose(found, wanted, rtol=0, atol=ulps * ULP * float(jnp.max(jnp.abs(wanted))))


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float16") for name in ALL), *((name, "bfloat16") for name in [*ALL][::6])]
)
def test_s04_on_a_product_it_equals_casting_the_product_first(name: str, dtype: str) -> None:
    """Elementwise operations bit for bit; where something is summed to 2 ulps."""
    x, w = operands()
    product = jnp.matmul(x.astype(dtype), w.astype(dtype))
    assert product.dtype == dtype
    found = on_product(ALL[name], dtype)(x, w)
    assert found.dtype == jnp.float32
    assert_equal(name, found, ALL[name](product.astype(jnp.float32)))


def test_s04_compiled_it_equals_casting_the_product_first() -> None:
    """To 4 float32 ulps of the largest element, since XLA fuses the two programs differently. In float16 only: of a
    bfloat16 product XLA's CPU backend may keep the float32 digits, with or without polyamp."""
    chosen = {name: ALL[name] for name in (*ELEMENTWISE, *REDUCTIONS, "layer norm by hand", "rms norm by hand")}

    def every(x: Any) -> dict[str, Any]:
        return {name: function(x) for name, function in chosen.items()}

    def by_hand(x: Any, w: Any) -> dict[str, Any]:
        return every(jnp.matmul(x.astype("float16"), w.astype("float16")).astype(jnp.float32))

    found, wanted = jax.jit(on_product(every, "float16"))(*operands()), jax.jit(by_hand)(*operands())
    for name in chosen:
        largest = float(jnp.max(jnp.abs(wanted[name])))
        np.testing.assert_allclose(found[name], wanted[name], rtol=0, atol=4 * ULP * largest, err_msg=name)


@pytest.mark.parametrize("name", [name for name in ALL if name not in ROUNDED])
def test_s04_on_a_declared_float16_input_it_equals_casting_first(name: str) -> None:
    x = jnp.matmul(*operands()).astype("float16")
    found = polyamp.Policy("mixed_float16").autocast(ALL[name])(x)
    assert_equal(name, found, ALL[name](x.astype(jnp.float32)))


@pytest.mark.parametrize("name", ROUNDED)
def test_s04_what_a_float16_program_rounds_itself_stays_rounded(name: str) -> None:
    x = jnp.matmul(*operands()).astype("float16")
    found = np.asarray(polyamp.Policy("mixed_float16").autocast(ALL[name])(x))
    wanted = np.asarray(ALL[name](x.astype(jnp.float32)))
    np.testing.assert_allclose(found, wanted, rtol=2.0**-10, err_msg=ROUNDED[name])
    assert not np.array_equal(found, wanted)


def test_s04_a_sum_of_many_float16_ones_is_finite() -> None:
    ones = jnp.ones((128, 1000))
    total = on_product(jnp.sum, "float16")(ones, jnp.eye(1000))
    assert float(total) == 128000.0
    declared = polyamp.Policy("mixed_float16").autocast(lambda x: x.sum())
    assert float(declared(jnp.ones(128000, jnp.float16))) == 128000.0
    assert float(jnp.finfo("float16").max) < 128000.0


def test_s04_squares_beyond_float16_are_finite() -> None:
    x = jnp.full((2, 4), 300.0)
    for square in (lambda x: x * x, jnp.square, lambda x: x**2, lambda x: jnp.power(x, 2)):
        found = on_product(lambda x, square=square: jnp.mean(square(x), -1), "float16")(x, jnp.eye(4))
        np.testing.assert_array_equal(np.asarray(found), [90000.0, 90000.0])


@pytest.mark.parametrize("fill", [-1e9, float(jnp.finfo(jnp.float32).min)])
@pytest.mark.parametrize("how", ["where", "add"])
def test_s04_a_fully_masked_row_is_finite(fill: float, how: str) -> None:
    mask = jnp.array([[True] * 4, [False] * 4])

    def attention(q: Any, k: Any) -> Any:
        scores = q @ k
        scores = jnp.where(mask, scores, fill) if how == "where" else scores + jnp.where(mask, 0.0, fill)
        return jax.nn.softmax(scores)

    run = polyamp.Policy("mixed_float16").autocast(attention)
    q, k = jnp.full((2, 4), 0.5), jnp.eye(4)
    found, gradient = run(q, k), jax.grad(lambda q: run(q, k)[:, 0].sum())(q)
    np.testing.assert_array_equal(np.asarray(found), np.full((2, 4), 0.25))
    assert bool(jnp.isfinite(gradient).all())


def test_s04_a_small_epsilon_does_not_become_zero() -> None:
    assert np.float16(1e-8) == 0
    zeros = jnp.zeros((2, 4))
    for function, wanted in (
        (rms_norm_by_hand, 0.0),
        (lambda x: jax.lax.rsqrt(x + 1e-8), 1e4),
        (lambda x: 1.0 / (x + 1e-8), 1e8),
        (lambda x: jnp.log(x + 1e-8), float(np.log(np.float32(1e-8)))),
    ):
        found = on_product(function, "float16")(zeros, jnp.eye(4))
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


SPREAD = 0.02
"""Standard deviation of what is normalised. The derivative of rsqrt at its variance, 4e-4, is beyond float16."""


class Small(linen.Module):
    """A layer normalisation, in the input's dtype, of activations with a small spread."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.Dense(16, kernel_init=linen.initializers.normal(SPREAD / 4), name="into")(x)
        scale = self.param("scale", linen.initializers.ones, (16,))
        centred = x - jnp.mean(x, -1, keepdims=True)
        variance = jnp.mean(centred * centred, -1, keepdims=True)
        return linen.Dense(1, name="out")(scale * (centred * jax.lax.rsqrt(variance + 1e-6)))


def small_batch() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, 16)).astype("f4")
    return {"x": jnp.asarray(x), "y": jnp.asarray(np.sign(x[:, :1]))}


def small_loss(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch["x"]), batch["y"])


def small_steps(policy: polyamp.Policy, steps: int) -> tuple[list[float], list[bool]]:
    scaler = polyamp.LossScaler(init_scale=1.0, growth_interval=10**6)
    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(2e-4), scaler=scaler)
    module, batch = Small(), small_batch()
    state = polyamp.init((module, module.init(jax.random.key(0), batch["x"])), recipe)
    step, losses, skipped = polyamp.train_step(small_loss, recipe), [], []
    for _ in range(steps):
        state, result = step(state, batch)
        losses.append(float(result.loss))
        skipped.append(bool(result.skipped))
    return losses, skipped


def test_s04_a_layer_norm_whose_float16_gradient_is_not_finite_trains() -> None:
    """At a loss scale of 1: the gradient itself, not its scaling, fails where the whole model is cast."""
    module, batch = Small(), small_batch()
    variables = module.init(jax.random.key(0), batch["x"])
    narrow = jax.tree.map(lambda leaf: leaf.astype("float16"), variables)

    def loss(variables: Any, x: Any) -> Any:
        return jnp.mean((module.apply(variables, x).astype("float32") - batch["y"]) ** 2)

    plain = jax.grad(loss)(narrow, batch["x"].astype("float16"))
    assert not all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(plain)), "plain JAX in float16"
    _, skipped = small_steps(polyamp.Policy("mixed_float16", mode="cast"), 3)
    assert all(skipped), "mode='cast'"
    losses, skipped = small_steps(polyamp.Policy("mixed_float16"), 20)
    assert not any(skipped)
    assert all(after < before for before, after in itertools.pairwise(losses))


LINEAR_ALGEBRA: dict[str, Callable[[Any], Any]] = {
    "expm": lambda x: jax.scipy.linalg.expm(x),
    "inv": jnp.linalg.inv,
    "solve": lambda x: jnp.linalg.solve(x, x[0]),
    "lstsq": lambda x: jnp.linalg.lstsq(x, x)[0],
    "det": jnp.linalg.det,
    "cholesky": lambda x: jnp.linalg.cholesky(x + x.T + 8 * jnp.eye(4)),
}


@pytest.mark.parametrize("name", LINEAR_ALGEBRA)
def test_s04_linear_algebra_runs_in_float32_as_a_whole(name: str) -> None:
    """expm among them: its coefficients are beyond float16, and its products would be NaN there."""
    function, policy = LINEAR_ALGEBRA[name], polyamp.Policy("mixed_float16")
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)) / 2, jnp.float32)
    np.testing.assert_array_equal(policy.autocast(function)(x), function(x))
    assert "float16" not in str(jax.make_jaxpr(policy.autocast(function))(x))
    rows = polyamp.explain(lambda x: function(x @ x), policy, x).operations
    assert {row.dtype for row in rows if "linear algebra" in row.rule} == {"float32"}


DIFFERENTIABLE: dict[str, Callable[[Any], Any]] = {
    "cholesky": jnp.linalg.cholesky,
    "inv": jnp.linalg.inv,
    "solve": lambda x: jnp.linalg.solve(x, x[0]),
    "eigh": lambda x: jnp.linalg.eigh(x)[1],
    "svd": lambda x: jnp.linalg.svd(x, full_matrices=False)[0],
    "qr": lambda x: jnp.linalg.qr(x)[0],
    "lu": lambda x: jax.scipy.linalg.lu(x)[1],
    "pinv": jnp.linalg.pinv,
    "jax.lax": jax.lax.linalg.cholesky,
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_s04_derivatives_of_linear_algebra_taken_inside_stay_in_float32(name: str) -> None:
    """They are linear algebra themselves, or products that ask for the highest precision."""
    square = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)) / 2, jnp.float32)
    x, gradient = square @ square.T + 4 * jnp.eye(4), jax.grad(lambda x: DIFFERENTIABLE[name](x).sum())
    run = polyamp.Policy("mixed_float16").autocast(gradient)
    assert "f16" not in str(jax.make_jaxpr(run)(x))
    np.testing.assert_array_equal(run(x), gradient(x))


def test_s04_a_users_function_with_a_name_of_linear_algebra_is_no_linear_algebra() -> None:
    @jax.jit
    def inv(x: Any) -> Any:
        return x @ x

    rows = polyamp.explain(inv, polyamp.Policy("mixed_float16"), jnp.ones((4, 4))).operations
    assert [(row.name, row.dtype) for row in rows] == [("dot_general", "float16")]
