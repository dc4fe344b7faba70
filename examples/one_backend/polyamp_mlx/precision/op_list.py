"""Which of MLX's functions run in which dtype where autocast acts (S3, S4). Read by `autocast`.

A function is named as `mlx.core` has it, with its submodule before it ("linalg.qr"), or `mlx.nn` ("nn.losses.l1_loss");
a method of arrays that computes the same has the same name and follows by itself. What stands in no list follows its
operands, as MLX promotes them.
"""

from __future__ import annotations

from typing import Final

FAMILIES: Final[dict[str, str]] = {
    "exponentials": "exp expm1 sinh cosh logaddexp",
    "logarithms": "log log1p log2 log10",
    "powers": "power pow rsqrt reciprocal",
    "sums": "sum mean prod var std trace vecdot",
    "cumulative sums": "cumsum cumprod logcumsumexp cumulative_sum cumulative_prod",
    "softmax": "softmax logsumexp",
    "normalisation": "fast.layer_norm fast.rms_norm linalg.norm matrix_norm",
    "losses": "fast.cross_entropy nn.losses.binary_cross_entropy nn.losses.cosine_similarity_loss "
    "nn.losses.cross_entropy nn.losses.gaussian_nll_loss nn.losses.hinge_loss nn.losses.huber_loss "
    "nn.losses.kl_div_loss nn.losses.l1_loss nn.losses.log_cosh_loss nn.losses.margin_ranking_loss "
    "nn.losses.mse_loss nn.losses.nll_loss nn.losses.smooth_l1_loss nn.losses.triplet_loss",
    "linear algebra": "linalg.inv linalg.pinv linalg.solve linalg.solve_triangular linalg.cholesky "
    "linalg.cholesky_inv linalg.qr linalg.svd linalg.eigh linalg.eigvalsh linalg.eig linalg.eigvals linalg.lu "
    "linalg.det linalg.slogdet linalg.tri_inv",
    "FFT": "fft.fft fft.ifft fft.rfft fft.irfft fft.fft2 fft.ifft2 fft.rfft2 fft.irfft2 fft.fftn fft.ifftn fft.rfftn "
    "fft.irfftn fft.stft fft.istft",
    "probabilities": "sigmoid erf",
}
"""Family of `polyamp.rules.sensitive` -> functions that run in float32; the last family is MLX's own: as autocast sees
one operation at a time, what gives probabilities is computed in float32 for the logarithm or `1 - p` behind it."""

PRODUCTS: Final = (
    "matmul addmm einsum tensordot inner conv1d conv2d conv3d conv_general conv_transpose1d conv_transpose2d "
    "conv_transpose3d fast.scaled_dot_product_attention"
)
"""Functions that run in the policy's compute dtype, unless they contract nothing or leave no axis free."""

GATHERS: Final = "take take_along_axis repeat"
"""Functions whose gradient is a sum over the rows that were read, which is taken in float32; so is that of indexing."""
