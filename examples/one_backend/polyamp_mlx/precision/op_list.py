"""Op list: the dtypes in which MLX's functions run under autocast (S3, S4).

Names are those of `mlx.core`, with the submodule ("linalg.qr"), or of `mlx.nn` ("nn.losses.l1_loss"). An array method
that computes the same has the same name and is included. Functions in no list follow their operands, by MLX's type
promotion.
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
"""Family of `polyamp.rules.float32_op_families` -> functions that run in float32. The last family is MLX's own:
autocast sees one operation at a time, so probabilities are float32 for a logarithm or `1 - p` after them."""

PRODUCTS: Final = (
    "matmul addmm einsum tensordot inner conv1d conv2d conv3d conv_general conv_transpose1d conv_transpose2d "
    "conv_transpose3d fast.scaled_dot_product_attention"
)
"""Functions that run in the policy's compute dtype, unless they contract nothing or leave no axis free."""

GATHERS: Final = "take take_along_axis repeat"
"""Functions whose gradient sums over the gathered rows; the sum runs in float32, as does that of indexing."""
