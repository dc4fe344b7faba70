"""Which Keras layers are sensitive (S4) or give probabilities, and the same for the operations of functional models.

Layers go by their class, and by the name of their activation; operations, made by calling `keras.ops` on the symbolic
tensors of a functional model, by the name of theirs. Called by `layer_choice`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import keras

from polyamp_tensorflow.compat import is_linear_algebra, layers_inside, layers_named, prepares_data


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


class Family(NamedTuple):
    """What Keras has of one family of `polyamp.rules.sensitive`.

    Attributes:
        layers: names of layers.
        functions: names of activations, and of functions of Keras and TensorFlow that a `Lambda` may call.
        operations: names of the classes of `keras.ops`.
    """

    layers: str
    functions: str
    operations: str


SENSITIVE: Final[Mapping[str, Family]] = {
    "exponentials": Family("", "exponential exp exp2 expm1 sinh cosh softplus", "Exp Exp2 Expm1 Sinh Cosh Softplus"),
    "logarithms": Family(
        "",
        "log log1p log2 log10 logaddexp logaddexp2 log_sigmoid erfinv ndtri xlogy xlog1py",
        "Log Log1p Log2 Log10 Logaddexp Logaddexp2 LogSigmoid Erfinv",
    ),
    "powers": Family("", "pow power rsqrt reciprocal reciprocal_no_nan", "Power Rsqrt Reciprocal"),
    "sums": Family(
        "GlobalAveragePooling1D GlobalAveragePooling2D GlobalAveragePooling3D "
        "AdaptiveAveragePooling1D AdaptiveAveragePooling2D AdaptiveAveragePooling3D",
        "sum mean var std prod trace reduce_sum reduce_mean reduce_prod reduce_variance reduce_std moments "
        "weighted_moments segment_sum segment_prod segment_mean "
        "unsorted_segment_sum unsorted_segment_mean unsorted_segment_prod",
        "Sum Nansum Mean Nanmean Average Var Nanvar Std Nanstd Prod Nanprod Trace Trapezoid Moments SegmentSum "
        "SegmentProd AdaptiveAveragePool Correlate",
    ),
    "cumulative sums": Family("", "cumsum cumprod cumulative_logsumexp", "Cumsum Cumprod Nancumsum Nancumprod"),
    "softmax": Family(
        "Softmax",
        "softmax log_softmax sparsemax logsumexp reduce_logsumexp",
        "Softmax LogSoftmax Sparsemax Logsumexp",
    ),
    "normalisation": Family(
        "BatchNormalization LayerNormalization GroupNormalization RMSNormalization UnitNormalization "
        "SpectralNormalization",
        "layer_normalization rms_normalization batch_normalization normalize norm l2_normalize lrn global_norm "
        "reduce_euclidean_norm",
        "BatchNorm LayerNorm RMSNorm Normalize",
    ),
    "losses": Family(
        "ActivityRegularization",
        "binary_crossentropy categorical_crossentropy sparse_categorical_crossentropy ctc_loss mean_squared_error "
        "mean_absolute_error mean_absolute_percentage_error mean_squared_logarithmic_error huber kl_divergence "
        "log_cosh poisson hinge squared_hinge categorical_hinge cosine_similarity binary_focal_crossentropy "
        "categorical_focal_crossentropy categorical_generalized_cross_entropy circle ctc dice tversky l2_loss "
        "log_poisson_loss sigmoid_cross_entropy_with_logits softmax_cross_entropy_with_logits "
        "sparse_softmax_cross_entropy_with_logits weighted_cross_entropy_with_logits",
        "BinaryCrossentropy CategoricalCrossentropy SparseCategoricalCrossentropy CTCLoss",
    ),
    "linear algebra": Family(  # of operations, those that `keras.ops.linalg` does not hold
        "",
        "cholesky cholesky_inverse det eig eigh inv logdet lstsq lu_factor matrix_rank pinv qr slogdet solve "
        "solve_triangular svd banded_triangular_solve cholesky_solve eigvals log_matrix_determinant lu "
        "matrix_determinant matrix_exponential matrix_inverse matrix_logarithm matrix_solve matrix_solve_ls "
        "matrix_square_root matrix_triangular_solve self_adjoint_eig self_adjoint_eigvals",
        "CDist Corrcoef Logdet Slogdet",
    ),
    "FFT": Family(
        "",
        "fft fft2 fft2d fft3d fftn ifft ifft2 ifft2d ifft3d ifftn rfft rfftn irfft irfftn stft istft inverse_stft dct "
        "idct mdct inverse_mdct",
        "FFT FFT2 IFFT2 RFFT IRFFT STFT ISTFT",
    ),
    "preparation of data": Family("Masking", "", ""),  # 1001 and 1000 are one number in bfloat16
}
"""The families of S4; the last is one of Keras's own."""
SENSITIVE_LAYERS: Final = layers_named(" ".join(family.layers for family in SENSITIVE.values()))
_FUNCTIONS: Final = names(" ".join(family.functions for family in SENSITIVE.values()))
_OPERATIONS: Final = names(" ".join(family.operations for family in SENSITIVE.values()))
PRODUCTS: Final = names(
    "Matmul Einsum Dot Tensordot Inner Vdot Conv ConvTranspose DepthwiseConv SeparableConv DotProductAttention"
)
DENSE_LAYERS: Final = layers_named(
    "Dense EinsumDense Conv1D Conv2D Conv3D Conv1DTranspose Conv2DTranspose Conv3DTranspose SeparableConv1D "
    "SeparableConv2D DepthwiseConv1D DepthwiseConv2D"
)
_PROBABILITIES: Final = names("softmax log_softmax sparsemax sigmoid log_sigmoid")
_PROBABILITY_OPERATIONS: Final = names("Softmax LogSoftmax Sparsemax Sigmoid LogSigmoid")


def is_sensitive(layer: Any) -> bool:
    """True for normalisations, softmax, means, the preparation of data, and layers with a sensitive activation."""
    if isinstance(layer, SENSITIVE_LAYERS) or prepares_data(layer):
        return True
    if isinstance(layer, keras.layers.Lambda):
        return _name(layer.function) in _FUNCTIONS
    if layers_inside(layer):
        return False  # its activation is one of its layers' or one step among others
    return _name(getattr(layer, "activation", None)) in _FUNCTIONS


def may_be_binary_head(layer: Any) -> bool:
    """True for a dense layer with a sigmoid: a binary classifier's head, or a gate."""
    dense = isinstance(layer, keras.layers.Dense | keras.layers.EinsumDense)
    return dense and _name(layer.activation) == "sigmoid"


def is_sensitive_operation(operation: Any) -> bool:
    """True for what S4 lists, linear algebra included."""
    return type(operation).__name__ in _OPERATIONS or is_linear_algebra(operation)


def is_product(operation: Any) -> bool:
    """True for matrix products, convolutions and attention. `dataflow` knows which of them are none by their axes."""
    return type(operation).__name__ in PRODUCTS


def gives_probabilities(target: Any) -> bool:
    """True for a softmax or sigmoid, as a layer, an activation or an operation."""
    if isinstance(target, keras.layers.Softmax):
        return True
    if isinstance(target, keras.Layer):
        return _name(getattr(target, "activation", None)) in _PROBABILITIES
    return type(target).__name__ in _PROBABILITY_OPERATIONS


def function_name(target: Any) -> str:
    """What an operation computes, or the last thing that a layer without sublayers does: its class, or the name of the
    activation or of a `Lambda`'s function; what a wrapper such as TimeDistributed wraps counts."""
    if not isinstance(target, keras.Layer):
        return type(target).__name__
    if isinstance(target, keras.layers.Wrapper):
        return function_name(target.layer)
    if isinstance(target, keras.layers.Lambda):
        return _name(target.function)
    return "" if layers_inside(target) else _name(getattr(target, "activation", None))


def is_dense(layer: Any) -> bool:
    """True for a dense layer or convolution, inside a wrapper such as TimeDistributed as well."""
    inner = layer.layer if isinstance(layer, keras.layers.Wrapper) else layer
    return isinstance(inner, DENSE_LAYERS)


def _name(function: Any) -> str:
    """A function's name, or that of an object's class, as users write it: `tf.nn.softmax` calls itself "softmax_v2" and
    `tf.signal.rfft` "_rfft"."""
    name = str(getattr(function, "__name__", type(function).__name__))
    return re.sub(r"_v\d+$", "", name.lstrip("_"))
