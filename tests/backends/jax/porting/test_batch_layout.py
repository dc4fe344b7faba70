"""Images of a batch are turned to the layout that the target takes, and the report says which."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import polyamp
from polyamp import porting

IMAGES = np.random.default_rng(0).standard_normal((3, 3, 6, 7)).astype(np.float32)
TURNED = "the target took the batch's images with their channels last"
AS_THEY_ARE = "the target took the batch's images as they are, and moves their channels itself"


class Source(eqx.Module):
    conv: eqx.nn.Conv2d
    fc: eqx.nn.Linear

    def __init__(self) -> None:
        self.conv = eqx.nn.Conv2d(3, 4, 3, key=jax.random.key(0))
        self.fc = eqx.nn.Linear(80, 5, key=jax.random.key(1))

    def __call__(self, x: Any) -> Any:
        return self.fc(jax.nn.relu(self.conv(x)).ravel())


def haiku_model(*, moves: bool = False, data_format: str = "NHWC") -> Any:
    def net(x: Any) -> Any:
        x = jnp.moveaxis(x, 1, -1) if moves else x
        x = jax.nn.relu(hk.Conv2D(4, 3, padding="VALID", data_format=data_format, name="conv")(x))
        return hk.Linear(5, name="fc")(x.reshape(x.shape[0], -1))

    model = hk.without_apply_rng(hk.transform(net))
    first = moves or data_format == "NCHW"
    return model, model.init(jax.random.key(2), IMAGES if first else np.moveaxis(IMAGES, 1, -1))


class Nnx(nnx.Module):
    def __init__(self, *, moves: bool) -> None:
        self.conv = nnx.Conv(3, 4, (3, 3), padding="VALID", rngs=nnx.Rngs(2))
        self.fc = nnx.Linear(80, 5, rngs=nnx.Rngs(3))
        self.moves = moves

    def __call__(self, x: Any) -> Any:
        x = nnx.relu(self.conv(jnp.moveaxis(x, 1, -1) if self.moves else x))
        return self.fc(x.reshape(x.shape[0], -1))


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.relu(linen.Conv(4, (3, 3), padding="VALID", name="conv")(jnp.moveaxis(x, 1, -1)))
        return linen.Dense(5, name="fc")(x.reshape(x.shape[0], -1))


@pytest.mark.parametrize("option", ["batch", "check"])
@pytest.mark.parametrize(
    ("target", "note"),
    [
        (haiku_model, TURNED),
        (lambda: haiku_model(moves=True), AS_THEY_ARE),
        (lambda: haiku_model(data_format="NCHW"), None),  # of the source's layout
        (lambda: Nnx(moves=False), TURNED),
        (lambda: Nnx(moves=True), AS_THEY_ARE),
        (lambda: (Linen(), Linen().init(jax.random.key(2), IMAGES)), AS_THEY_ARE),
    ],
)
def test_s30_images_are_turned_where_the_target_takes_them_so(target: Any, note: str | None, option: str) -> None:
    options: dict[str, Any] = {option: IMAGES}
    ported, report = polyamp.port(Source(), target(), **options)
    assert [each for each in report.notes if each.startswith("the target took")] == ([note] if note else [])
    x = IMAGES[::-1]
    given = np.moveaxis(x, 1, -1) if note == TURNED else x
    there = ported[0].apply(ported[1], given) if isinstance(ported, tuple) else ported(given)
    np.testing.assert_allclose(there, jax.vmap(Source())(x), rtol=1e-4, atol=1e-5)


def test_s30_a_target_that_takes_neither_layout_is_told_of_the_turned_images() -> None:
    with pytest.raises(ValueError, match="conv/w"):
        polyamp.port(Source(), haiku_model(), check=IMAGES[:, :2])
    with pytest.raises(Exception, match=r"(?i)feature"):
        polyamp.port(Source(), Nnx(moves=False), check=porting.Batch(IMAGES, IMAGES))
