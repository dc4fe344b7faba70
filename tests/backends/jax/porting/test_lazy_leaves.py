"""Arrays that a port makes share no memory with what they are made of."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from polyamp.porting.files.strided_copies import aligned_copy
from polyamp_jax.porting.jax_only.lazy_leaves import array_like


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_filled_array_does_not_follow_its_source(dtype: type, transposed: bool) -> None:
    source = aligned_copy(np.ones((256, 256), dtype))  # aligned, as torch's memory is
    made = array_like(jnp.zeros((256, 256), dtype), source.T if transposed else source)
    source[...] = 2
    assert made.dtype == dtype
    assert np.asarray(made).astype(np.float32).tolist() == np.ones((256, 256)).tolist()
