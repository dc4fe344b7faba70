"""Rules and families of torch's kernels, by their names in `torch.ops.aten` without underscores at the ends."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Final

from polyamp.rules.operation_families import (
    ATTENTION,
    CONVOLUTIONS,
    ELEMENTWISE,
    MATRIX_PRODUCTS,
    RECURRENT,
)
from polyamp_torch.precision.op_list import TORCH_OP_FAMILIES

_COMPUTE: Final[Mapping[str, str]] = {
    MATRIX_PRODUCTS: "mm addmm bmm baddbmm addbmm addmv mv trilinear",
    CONVOLUTIONS: "convolution mkldnn_convolution cudnn_convolution conv_tbc",
    RECURRENT: "mkldnn_rnn_layer cudnn_rnn thnn_fused_lstm_cell thnn_fused_gru_cell",
    ATTENTION: """
        scaled_dot_product_flash_attention scaled_dot_product_flash_attention_for_cpu
        scaled_dot_product_efficient_attention scaled_dot_product_cudnn_attention
    """,
}
_FLOAT32: Final[Mapping[str, str]] = {
    "sums": "dot vdot",
    "normalisation": """
        cudnn_batch_norm native_batch_norm_legit native_batch_norm_legit_no_training native_batch_norm_legit_functional
        fused_rms_norm linalg_vector_norm native_norm
    """,
    "losses": "nll_loss_forward nll_loss2d_forward",
    "logarithms": "log_sigmoid_forward",
    "distances": "cdist_forward pdist_forward",
    "softmax": "safe_softmax",
}
"""Kernels of the functions of the op list, where they have a name of their own."""
_PROMOTE: Final = """
add sub rsub mul div where maximum minimum fmax fmin atan2 remainder fmod lerp addcmul addcdiv hypot copysign prelu
masked_fill index_add index_put scatter_add
"""
_FOLLOW: Final = """
relu relu6 gelu silu mish tanh neg abs sign clamp clamp_min clamp_max threshold hardtanh leaky_relu elu celu selu
hardswish hardsigmoid glu sqrt sin cos floor ceil round trunc bernoulli native_dropout dropout max min amax amin topk
sort max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d adaptive_avg_pool2d adaptive_avg_pool3d
adaptive_max_pool2d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d embedding gather index index_select
scatter cummax cummin
"""
_DATA_MOVEMENT: Final = """
view reshape reshape_alias unsafe_view permute transpose t expand unsqueeze squeeze slice select split
split_with_sizes unbind detach alias clone copy contiguous cat stack empty empty_like empty_strided new_empty
new_empty_strided zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full fill zero arange
lift_fresh lift_fresh_copy as_strided diagonal constant_pad_nd repeat roll flip tril triu scalar_tensor
local_scalar_dense uniform normal rand randn rand_like randn_like view_as_real view_as_complex resize set resolve_conj
item unfold select_backward slice_backward unfold_backward diagonal_backward
"""
DATA_MOVEMENT: Final = frozenset(_DATA_MOVEMENT.split())
"""Kernels that only move or create data; casting reports have no rows for them."""
_BACKWARD: Final = re.compile(r"_backward(_\w+)?$")
_LIBRARY: Final = ("linalg_", "linear algebra"), ("fft_", "FFT")


@functools.lru_cache(maxsize=4096)
def kernel_rule(name: str) -> str:
    """Return the op list of a kernel of the forward pass: "compute", "float32", "promote", "follow" or "unknown".

    >>> kernel_rule("addmm"), kernel_rule("softmax"), kernel_rule("i0")
    ('compute', 'float32', 'unknown')
    """
    if name in _families(compute=True):
        return "compute"
    if name in _families(compute=False) or name.startswith(tuple(prefix for prefix, _ in _LIBRARY)):
        return "float32"
    if name in _PROMOTE.split():
        return "promote"
    return "follow" if name in _FOLLOW.split() else "unknown"


@functools.lru_cache(maxsize=4096)
def kernel_family(name: str) -> str:
    """Return the family of a kernel of either pass (`polyamp.rules.operation_families`).

    >>> kernel_family("addmm"), kernel_family("native_layer_norm_backward"), kernel_family("relu")
    ('matrix products', 'normalisation', 'elementwise')
    """
    plain = _BACKWARD.sub("", name)
    known = _families(compute=True) | _families(compute=False)
    for form in (plain, "_".join((plain, "forward"))):  # nll_loss_backward
        if form in known:
            return known[form]
    return next((family for prefix, family in _LIBRARY if plain.startswith(prefix)), ELEMENTWISE)


@functools.cache
def _families(*, compute: bool) -> dict[str, str]:
    """Return kernel -> family, of those that run in the compute dtype, or of those that run in float32."""
    rows = [*(_COMPUTE if compute else _FLOAT32).items()]
    rows += [] if compute else [(row.family, row.names) for row in TORCH_OP_FAMILIES]
    return {word.strip("_"): family for family, words in rows for word in words.split()}
