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
