"""TensorFlow's operations by family (S4), as reports name them.

Layers are cast by the lists of Keras's layers and functions, in `polyamp_keras.precision.op_list`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from polyamp.rules import operation_families as families
from polyamp_keras.compat import split_names

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
"""Sensitive operations by the families of S4."""
RULE_BY_OPERATION: Final[Mapping[str, str]] = {
    **{name: "compute" for words in _PRODUCTS.values() for name in split_names(words)},
    **{name: family for family, words in _FAMILIES.items() for name in split_names(words)},
}
"""Operation -> "compute" for a product, or its sensitive family; others follow their inputs."""
_FAMILY_BY_NAME: Final = {
    name: family
    for table in (_PRODUCTS, _FAMILIES, {families.SATURATING: "Sigmoid Erf Erfc Softsign"})
    for family, words in table.items()
    for name in split_names(words)
}
DATA_MOVEMENT: Final = split_names(
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
    return name in DATA_MOVEMENT or name.startswith(_DATA_MOVEMENT_PREFIXES)
