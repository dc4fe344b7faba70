"""TensorFlow operations that a forward pass runs, with their layers and dtypes.

TensorFlow reports each operation as it runs: after all casts, and inside Keras's own functions.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import tensorflow as tf

from polyamp.contract.casting_report import OperationCount
from polyamp.float_formats import FLOAT_DTYPES
from polyamp.rules import operation_families as families
from polyamp_keras.compat import layer_classes, split_names
from polyamp_keras.engines.tensorflow_compat import report_operations
from polyamp_keras.precision.layer_method_wrappers import copy_signature, late_call
from polyamp_keras.precision.op_list import SENSITIVE

_PRODUCTS: Final[Mapping[str, str]] = {
    families.MATRIX_PRODUCTS: "MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum SparseMatMul",
    families.CONVOLUTIONS: "Conv Conv2D Conv3D DepthwiseConv2dNative Conv2DBackpropInput Conv3DBackpropInputV2",
    families.RECURRENT: "CudnnRNN CudnnRNNV2 CudnnRNNV3",
}
_GRADIENT: Final = re.compile(r"(Backprop\w*|Grad(V\d)?)$")
"""Ending of the name of an operation's gradient, such as ReluGrad or Conv2DBackpropFilter."""
_FAMILIES: Final[Mapping[str, str]] = {
    "exponentials": "Exp Expm1 Sinh Cosh Softplus",
    "logarithms": "Log Log1p Erfinv Ndtri Xlogy Xlog1py",
    "powers": "Pow Rsqrt Reciprocal Inv",
    "sums": "Sum Mean Prod SegmentSum SegmentMean SegmentProd UnsortedSegmentSum UnsortedSegmentProd AvgPool AvgPool3D",
    "cumulative sums": "Cumsum Cumprod CumulativeLogsumexp",
    "softmax": "Softmax LogSoftmax",
    "normalisation": "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 LRN EuclideanNorm",
    "losses": "SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits CTCLoss CTCLossV2 L2Loss",
    "linear algebra": "Cholesky MatrixInverse MatrixSolve MatrixSolveLs MatrixTriangularSolve MatrixDeterminant "
    "LogMatrixDeterminant MatrixExponential MatrixLogarithm MatrixSquareRoot SelfAdjointEigV2 Eig Qr Svd Lu",
    "FFT": "FFT FFT2D FFT3D IFFT IFFT2D IFFT3D RFFT RFFT2D RFFT3D IRFFT IRFFT2D IRFFT3D",
}
"""TensorFlow's operations by the families of S4; `op_list` has those of Keras."""
_RULES: Final = {
    **{name: "compute" for words in _PRODUCTS.values() for name in split_names(words)},
    **{name: family for family, words in _FAMILIES.items() for name in split_names(words)},
}
_FAMILY_BY_NAME: Final = {
    name: family
    for table in (_PRODUCTS, _FAMILIES, {families.SATURATING: "Sigmoid Erf Erfc Softsign"})
    for family, words in table.items()
    for name in split_names(words)
}
_DATA_MOVEMENT: Final = split_names(
    "Identity IdentityN Cast Reshape Transpose Shape ShapeN Size Rank Const Fill ZerosLike OnesLike Pack Unpack Concat "
    "ConcatV2 Split SplitV Slice StridedSlice ExpandDims Squeeze Tile Pad PadV2 MirrorPad BroadcastTo BroadcastArgs "
    "Gather GatherV2 GatherNd ResourceGather ResourceGatherNd ReadVariableOp AssignVariableOp AssignAddVariableOp "
    "AssignSubVariableOp ReverseV2 Roll Select SelectV2 Range LinSpace StopGradient PreventGradient Where Bitcast "
    "TensorListFromTensor TensorListStack TensorListReserve TensorListSetItem TensorListGetItem EnsureShape "
    "Greater GreaterEqual Less LessEqual Equal NotEqual IsFinite IsNan VarHandleOp CheckNumericsV2 OneHot "
    "MatrixBandPart BatchToSpaceND SpaceToBatchND SpaceToDepth DepthToSpace MatrixDiagV3 MatrixDiagPartV3 "
    "InvertPermutation Assert"
)
"""Operations that only move, create or compare data."""
_DATA_MOVEMENT_PREFIXES: Final = ("Placeholder", "TensorList", "StridedSliceGrad")
"""Beginnings of the names of such operations in graphs."""


def operation_family(name: str) -> str:
    """Return the family of an operation, or of a gradient's, in a casting report (`polyamp.rules.operation_families`).

    >>> operation_family("MatMul"), operation_family("SigmoidGrad"), operation_family("FusedBatchNormGradV3")
    ('matrix products', 'saturating functions', 'normalisation')
    """
    plain = _GRADIENT.sub("", name)
    return next((_FAMILY_BY_NAME[each] for each in (name, plain) if each in _FAMILY_BY_NAME), families.ELEMENTWISE)


def moves_data(name: str) -> bool:
    """Return whether an operation only moves, creates or compares data: a casting report has no row of it."""
    return name in _DATA_MOVEMENT or name.startswith(_DATA_MOVEMENT_PREFIXES)


class OpDtypeRecorder:
    """Recorder of the operations in one forward pass.

    Args:
        enabled: False records nothing.

    Attributes:
        casts: (dtype, dtype) -> number of casts between floating dtypes.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.casts: Counter[tuple[str, str]] = Counter()
        self._enabled = enabled
        self._counts: Counter[tuple[str, str, str, str, str]] = Counter()
        self._layers: list[tuple[str, str]] = []
        self._paused = False

    def wrap_call(self, layer: Any, path: str) -> Callable[..., Any]:
        """Return a layer's `call`, wrapped to mark the layer as the running one."""
        call = late_call(layer)
        if not self._enabled:
            return call
        family = "follow" if _has_own_call(layer) else _family(layer)

        def called(*args: Any, **kwargs: Any) -> Any:
            self._layers.append((path, family))
            try:
                return call(*args, **kwargs)
            finally:
                self._layers.pop()

        return copy_signature(call, called)

    @contextlib.contextmanager
    def record_ops(self) -> Iterator[None]:
        """Context manager that records the operations in it."""
        if not self._enabled:
            yield
            return
        with report_operations(self._note):
            yield

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager whose operations are not recorded."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def rows(self) -> list[OperationCount]:
        """Return the recorded operations, in the order in which each first ran."""
        return [OperationCount(*key[:4], count, key[4]) for key, count in self._counts.items()]

    def add_backward(self, layer: str, name: str, inputs: Any, outputs: Any) -> None:
        """Record an operation of a backward pass."""
        dtypes = _floating_dtypes(inputs) or _floating_dtypes(outputs)
        if dtypes and not moves_data(name):
            self._counts[layer, name, ", ".join(dtypes), "follow", "backward"] += 1

    def _note(self, name: str | bytes, inputs: Any, outputs: Any) -> None:
        if self._paused:
            return
        name = name.decode() if isinstance(name, bytes) else name
        if name == "Cast":
            source, target = _floating_dtypes(inputs), _floating_dtypes(outputs)
            if source and target and source != target:
                self.casts[source[0], target[0]] += 1
        if name in _DATA_MOVEMENT:
            return
        dtypes = _floating_dtypes(inputs) or _floating_dtypes(outputs)
        if dtypes:
            layer, family = self._layers[-1] if self._layers else ("", "")
            rule = _RULES.get(name, "follow")
            found = rule if rule in ("compute", "follow") else family or rule
            self._counts[layer, name, ", ".join(dtypes), found, "forward"] += 1


def _family(layer: Any) -> str:
    """Return the family of a layer that is sensitive as a whole, such as a normalisation with its means and roots."""
    return next((name for name, family in SENSITIVE.items() if isinstance(layer, layer_classes(family.layers))), "")


def _has_own_call(layer: Any) -> bool:
    """Return whether the user wrote a layer's `call`: its operations take the dtype of their operands."""
    module = getattr(type(layer).call, "__module__", None) or ""
    return module.partition(".")[0] not in ("keras", "keras_hub", "tf_keras")


def _floating_dtypes(tensors: Any) -> list[str]:
    return sorted(
        {tensor.dtype.name for tensor in tensors if tf.is_tensor(tensor) and tensor.dtype.name in FLOAT_DTYPES}
    )
