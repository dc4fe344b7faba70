"""JAX: the cross-entropy at the labels alone has the values and gradients of a whole log_softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyamp


def plain(logits, labels):
    found = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(found, labels[..., None], axis=-1)[..., 0]


def loss(logits, labels):
    return polyamp.losses.softmax_cross_entropy(logits, labels, reduction="none")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("offset", [0.0, 1e3, -1e3])
def test_s24_cross_entropy_and_its_gradient_equal_log_softmax(dtype, offset):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(0.0, 10.0, (3, 5, 7)) + offset, dtype)
    labels = jnp.asarray(rng.integers(0, 7, (3, 5)))
    np.testing.assert_allclose(loss(logits, labels), plain(logits, labels), rtol=1e-6, atol=1e-6)
    got = jax.grad(lambda x: loss(x, labels).sum())(logits)
    assert got.dtype == dtype
    expected = jax.grad(lambda x: plain(x, labels).sum())(logits)
    np.testing.assert_allclose(
        np.asarray(got, "f4"), np.asarray(expected, "f4"), rtol=1e-5, atol=float(jnp.finfo(dtype).eps)
    )


def test_s24_cross_entropy_keeps_small_losses_beside_large_logits():
    """logsumexp(x) - x[label], the formula of optax, rounds to the spacing of the logits, 2^-10 here."""
    logits = jnp.array([[1e4, 1e4 - 8.0]])
    expected = np.log1p(np.exp(-8.0))
    np.testing.assert_allclose(loss(logits, jnp.array([0])), [expected], rtol=1e-4)


def test_s24_cross_entropy_of_masked_classes_is_finite_and_so_is_its_gradient():
    logits = jnp.array([[0.0, -jnp.inf, 1.0]])
    labels = jnp.array([2])
    np.testing.assert_allclose(loss(logits, labels), plain(logits, labels), rtol=1e-6)
    found = jax.grad(lambda x: loss(x, labels).sum())(logits)
    assert np.isfinite(found).all()
    assert found[0, 1] == 0.0


def arrays(jaxpr):
    """The results of all operations of a program, inner programs included."""
    for eqn in jaxpr.eqns:
        yield from (variable.aval for variable in eqn.outvars)
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from arrays(inner)


def head():
    rng = np.random.default_rng(0)
    hidden, weight = (
        jnp.asarray(rng.normal(size=(2, 32, 4)), "float32"),
        jnp.asarray(rng.normal(size=(500, 4)), "float32"),
    )
    return hidden, weight, jnp.asarray(rng.integers(0, 500, (2, 32)))


def test_s24_no_array_of_the_program_holds_more_than_a_chunks_logits():
    hidden, weight, tokens = head()

    def loss(hidden, weight):
        return polyamp.losses.chunked_causal_language_model(hidden, weight, tokens, chunks=8)

    program = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(hidden, weight)
    assert max(aval.size for aval in arrays(program.jaxpr)) == 2 * 4 * 500


def test_s24_chunks_in_an_autocast_function_compute_in_its_dtype():
    hidden, weight, tokens = head()
    policy = polyamp.Policy("mixed_bfloat16")

    def chunked(hidden, weight):
        return polyamp.losses.chunked_causal_language_model(hidden, weight, tokens, chunks=8)

    def whole(hidden, weight):
        return polyamp.losses.causal_language_model(hidden @ weight.T, tokens)

    def explicit(hidden, weight):
        return polyamp.losses.chunked_causal_language_model(hidden, weight, tokens, chunks=8, dtype="bfloat16")

    expected, gradients = jax.value_and_grad(policy.autocast(whole), (0, 1))(hidden, weight)
    for function in (policy.autocast(chunked), explicit, policy.autocast(explicit)):
        loss, found = jax.jit(jax.value_and_grad(function, (0, 1)))(hidden, weight)
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
        for one, other in zip(found, gradients, strict=True):
            assert one.dtype == jnp.float32
            np.testing.assert_allclose(one, other, rtol=0, atol=0.01 * float(jnp.abs(other).max()))
    assert abs(float(whole(hidden, weight)) - float(expected)) > 1e-5 * float(expected), "bfloat16 shows in the loss"
