"""Lists of sensitive (S4) and probability-valued Keras layers, and of such operations in functional models.

Layers are identified by their class and by the name of their activation. Operations, which calls of `keras.ops` on
symbolic tensors create, are identified by the name of their class.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import keras

from polyamp_keras.compat import child_layers, is_linear_algebra, is_preprocessing_layer, layer_classes, split_names


class KerasFamily(NamedTuple):
    """Keras's members of one family of `polyamp.rules.float32_op_families`.

    Attributes:
        layers: names of layers.
        functions: names of activations, and of functions of Keras and TensorFlow that a `Lambda` may call.
        operations: names of the classes of `keras.ops`.
    """

    layers: str
    functions: str
    operations: str


SENSITIVE: Final[Mapping[str, KerasFamily]] = {
    "exponentials": KerasFamily(
        "", "exponential exp exp2 expm1 sinh cosh softplus", "Exp Exp2 Expm1 Sinh Cosh Softplus"
    ),
    "logarithms": KerasFamily(
        "",
        "log log1p log2 log10 logaddexp logaddexp2 log_sigmoid erfinv ndtri xlogy xlog1py",
        "Log Log1p Log2 Log10 Logaddexp Logaddexp2 LogSigmoid Erfinv",
    ),
    "powers": KerasFamily("", "pow power rsqrt reciprocal reciprocal_no_nan", "Power Rsqrt Reciprocal"),
    "sums": KerasFamily(
        "GlobalAveragePooling1D GlobalAveragePooling2D GlobalAveragePooling3D "
        "AdaptiveAveragePooling1D AdaptiveAveragePooling2D AdaptiveAveragePooling3D",
        "sum mean var std prod trace reduce_sum reduce_mean reduce_prod reduce_variance reduce_std moments "
        "weighted_moments segment_sum segment_prod segment_mean "
        "unsorted_segment_sum unsorted_segment_mean unsorted_segment_prod",
        "Sum Nansum Mean Nanmean Average Var Nanvar Std Nanstd Prod Nanprod Trace Trapezoid Moments SegmentSum "
        "SegmentProd AdaptiveAveragePool Correlate",
    ),
    "cumulative sums": KerasFamily("", "cumsum cumprod cumulative_logsumexp", "Cumsum Cumprod Nancumsum Nancumprod"),
    "softmax": KerasFamily(
        "Softmax",
        "softmax log_softmax sparsemax logsumexp reduce_logsumexp",
        "Softmax LogSoftmax Sparsemax Logsumexp",
    ),
    "normalisation": KerasFamily(
        "BatchNormalization LayerNormalization GroupNormalization RMSNormalization UnitNormalization "
        "SpectralNormalization",
        "layer_normalization rms_normalization batch_normalization normalize norm l2_normalize lrn global_norm "
        "reduce_euclidean_norm",
        "BatchNorm LayerNorm RMSNorm Normalize",
    ),
    "losses": KerasFamily(
        "ActivityRegularization",
        "binary_crossentropy categorical_crossentropy sparse_categorical_crossentropy ctc_loss mean_squared_error "
        "mean_absolute_error mean_absolute_percentage_error mean_squared_logarithmic_error huber kl_divergence "
        "log_cosh poisson hinge squared_hinge categorical_hinge cosine_similarity binary_focal_crossentropy "
        "categorical_focal_crossentropy categorical_generalized_cross_entropy circle ctc dice tversky l2_loss "
        "log_poisson_loss sigmoid_cross_entropy_with_logits softmax_cross_entropy_with_logits "
        "sparse_softmax_cross_entropy_with_logits weighted_cross_entropy_with_logits",
        "BinaryCrossentropy CategoricalCrossentropy SparseCategoricalCrossentropy CTCLoss",
    ),
    "linear algebra": KerasFamily(  # operations: those outside `keras.ops.linalg`
        "",
        "cholesky cholesky_inverse det eig eigh inv logdet lstsq lu_factor matrix_rank pinv qr slogdet solve "
        "solve_triangular svd banded_triangular_solve cholesky_solve eigvals log_matrix_determinant lu "
        "matrix_determinant matrix_exponential matrix_inverse matrix_logarithm matrix_solve matrix_solve_ls "
        "matrix_square_root matrix_triangular_solve self_adjoint_eig self_adjoint_eigvals",
        "CDist Corrcoef Logdet Slogdet",
    ),
    "FFT": KerasFamily(
        "",
        "fft fft2 fft2d fft3d fftn ifft ifft2 ifft2d ifft3d ifftn rfft rfftn irfft irfftn stft istft inverse_stft dct "
        "idct mdct inverse_mdct",
        "FFT FFT2 IFFT2 RFFT IRFFT STFT ISTFT",
    ),
    "preparation of data": KerasFamily("Masking", "", ""),  # 1001 and 1000 are equal in bfloat16
}
"""Families of S4; the last one exists only for Keras."""
SENSITIVE_LAYERS: Final = layer_classes(" ".join(family.layers for family in SENSITIVE.values()))
_FUNCTIONS: Final = split_names(" ".join(family.functions for family in SENSITIVE.values()))
_OPERATIONS: Final = split_names(" ".join(family.operations for family in SENSITIVE.values()))
PRODUCTS: Final = split_names(
    "Matmul Einsum Dot Tensordot Inner Vdot Conv ConvTranspose DepthwiseConv SeparableConv DotProductAttention"
)
DENSE_LAYERS: Final = layer_classes(
    "Dense EinsumDense Conv1D Conv2D Conv3D Conv1DTranspose Conv2DTranspose Conv3DTranspose SeparableConv1D "
    "SeparableConv2D DepthwiseConv1D DepthwiseConv2D"
)
_PROBABILITIES: Final = split_names("softmax log_softmax sparsemax sigmoid log_sigmoid")
_PROBABILITY_OPERATIONS: Final = split_names("Softmax LogSoftmax Sparsemax Sigmoid LogSigmoid")


def is_sensitive(layer: Any) -> bool:
    """Return whether a layer is a normalisation, softmax, mean or data preparation, or has a sensitive activation."""
    if isinstance(layer, SENSITIVE_LAYERS) or is_preprocessing_layer(layer):
        return True
    if isinstance(layer, keras.layers.Lambda):
        return public_function_name(layer.function) in _FUNCTIONS
    if child_layers(layer):
        return False  # its activation belongs to a child layer or is one step among others
    return public_function_name(getattr(layer, "activation", None)) in _FUNCTIONS


def is_possible_binary_head(layer: Any) -> bool:
    """Return whether a layer is dense with a sigmoid: a binary classifier's head, or a gate."""
    dense = isinstance(layer, keras.layers.Dense | keras.layers.EinsumDense)
    return dense and public_function_name(layer.activation) == "sigmoid"


def is_sensitive_operation(operation: Any) -> bool:
    """Return whether S4 lists an operation, linear algebra included."""
    return type(operation).__name__ in _OPERATIONS or is_linear_algebra(operation)


def is_product(operation: Any) -> bool:
    """Return whether an operation is a matrix product, convolution or attention; `functional_graph` checks the axes."""
    return type(operation).__name__ in PRODUCTS


def has_probability_output(target: Any) -> bool:
    """Return whether a target is a softmax or sigmoid, as a layer, an activation or an operation."""
    if isinstance(target, keras.layers.Softmax):
        return True
    if isinstance(target, keras.Layer):
        return public_function_name(getattr(target, "activation", None)) in _PROBABILITIES
    return type(target).__name__ in _PROBABILITY_OPERATIONS


def function_name(target: Any) -> str:
    """Return the name of what an operation computes, or of the last function of a layer without child layers: a class,
    an activation or a `Lambda`'s function. A wrapper such as TimeDistributed returns the name of its layer."""
    if not isinstance(target, keras.Layer):
        return type(target).__name__
    if isinstance(target, keras.layers.Wrapper):
        return function_name(target.layer)
    if isinstance(target, keras.layers.Lambda):
        return public_function_name(target.function)
    return "" if child_layers(target) else public_function_name(getattr(target, "activation", None))


def is_dense(layer: Any) -> bool:
    """Return whether a layer is dense or a convolution, also inside a wrapper such as TimeDistributed."""
    inner = layer.layer if isinstance(layer, keras.layers.Wrapper) else layer
    return isinstance(inner, DENSE_LAYERS)


def public_function_name(function: Any) -> str:
    """Return the public name of a function or of an object's class: the `__name__` of `tf.nn.softmax` is "softmax_v2",
    that of `tf.signal.rfft` "_rfft"."""
    name = str(getattr(function, "__name__", type(function).__name__))
    return re.sub(r"_v\d+$", "", name.lstrip("_"))
