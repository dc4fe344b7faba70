"""Which Keras layers are sensitive (S4) or give probabilities, and the same for the operations of functional models.

Layers go by their class, and by the name of their activation; operations, made by calling `keras.ops` on the symbolic
tensors of a functional model, by the name of theirs. Called by `layer_choice`.
"""

from __future__ import annotations

from typing import Any, Final

import keras

from polyamp_tensorflow.compat import is_linear_algebra, layers_inside, layers_named, prepares_data


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


SENSITIVE_LAYERS: Final = layers_named(
    "BatchNormalization LayerNormalization GroupNormalization RMSNormalization UnitNormalization SpectralNormalization "
    "Softmax ActivityRegularization Masking GlobalAveragePooling1D GlobalAveragePooling2D GlobalAveragePooling3D "
    "AdaptiveAveragePooling1D AdaptiveAveragePooling2D AdaptiveAveragePooling3D"
)
SENSITIVE_FUNCTIONS: Final = names(
    "softmax log_softmax sparsemax logsumexp reduce_logsumexp softplus log_sigmoid exponential exp exp2 expm1 log "
    "log1p log2 log10 logaddexp pow power rsqrt reciprocal erfinv sum mean var std prod trace cumsum cumprod "
    "reduce_sum reduce_mean reduce_prod reduce_variance reduce_std moments "
    "layer_normalization rms_normalization batch_normalization normalize norm"
)
SENSITIVE_OPERATIONS: Final = names(
    "Exp Exp2 Expm1 Log Log1p Log2 Log10 Logaddexp Logaddexp2 Logsumexp Power Rsqrt Reciprocal Erfinv Softplus "
    "Sum Nansum Mean Nanmean Average Var Nanvar Std Nanstd Prod Nanprod Cumsum Cumprod Nancumsum Nancumprod Trace "
    "Trapezoid Moments SegmentReduction Softmax LogSoftmax LogSigmoid Sparsemax BatchNorm LayerNorm RMSNorm Normalize "
    "BinaryCrossentropy CategoricalCrossentropy SparseCategoricalCrossentropy CTCLoss CDist Corrcoef Correlate "
    "FFT FFT2 IFFT2 RFFT IRFFT STFT ISTFT Logdet Slogdet"
)
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
        return _name(layer.function) in SENSITIVE_FUNCTIONS
    if layers_inside(layer):
        return False  # its activation is one of its layers' or one step among others
    return _name(getattr(layer, "activation", None)) in SENSITIVE_FUNCTIONS


def may_be_binary_head(layer: Any) -> bool:
    """True for a dense layer with a sigmoid: a binary classifier's head, or a gate."""
    dense = isinstance(layer, keras.layers.Dense | keras.layers.EinsumDense)
    return dense and _name(layer.activation) == "sigmoid"


def is_sensitive_operation(operation: Any) -> bool:
    """True for what S4 lists, linear algebra included."""
    return type(operation).__name__ in SENSITIVE_OPERATIONS or is_linear_algebra(operation)


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
    return str(getattr(function, "__name__", type(function).__name__))
