"""`Harness`: the models and functions of a backend that one suite uses to test every framework.

A backend's `testing()` returns one. All weights are NumPy arrays in one layout, dense kernels as (in, out), so every
framework gets the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np

    from polyamp.recipe.recipe import Recipe
    from polyamp.results import LossFunction, StepResult

    Array = np.ndarray[Any, Any]

ObserveCallback = Callable[[str], None]
"""Receives the canonical dtype name of an inner result while the model runs or is traced."""


class DenseWeights(NamedTuple):
    """Weights of a dense layer.

    Attributes:
        kernel: shape (in, out); float32, or the dtype in which the model stores its parameters.
        bias: shape (out,), of the same dtype.
    """

    kernel: Array
    bias: Array


class Harness(Protocol):
    """Additions to `Backend` for the conformance suite, the parity runner and the demo."""

    def array(self, value: Array) -> Any:
        """Convert a NumPy array to the framework's own, with the same dtype."""

    def float64(self) -> AbstractContextManager[Any]:
        """Return a block that allows float64 models, states and batches; it has no effect if they are always allowed.
        A framework without float64 raises `UnsupportedError`, and `s01_float64` is a deviation."""

    def mlp(self, layers: Sequence[DenseWeights], *, observe: ObserveCallback | None = None) -> Any:
        """Return dense -> relu -> ... -> dense, in the framework's customary model class.

        The layers' module paths end in `dense0`, `dense1`, ...; `observe` receives the dtype of each dense result.
        """

    def branches(self, layers: Sequence[DenseWeights]) -> Any:
        """Return parallel dense layers, named as in `mlp`: `model(x)` is the sequence `(dense0(x), dense1(x), ...)`,
        so that a loss can leave some out (S23)."""

    def normalized_mlp(self, layers: Sequence[DenseWeights]) -> Any:
        """Return dense -> batch normalisation with running statistics -> relu -> dense, in training mode."""

    def dropout_mlp(self, layers: Sequence[DenseWeights]) -> tuple[Any, dict[str, Any]] | None:
        """Return dense -> relu -> dropout (p = 0.5) -> dense in training mode (two layers), and the options of
        `polyamp.init` for its random streams; None if models have no randomness (S12)."""

    def constrained_mlp(self, layers: Sequence[DenseWeights], limit: float) -> Any:
        """Return `mlp` with a forward pass that first clips the kernel of dense0 to [-limit, limit] in place, as a
        max-norm constraint does (S12); None if models cannot write to their parameters."""

    def digits(self, weights: Mapping[str, Array]) -> Any:
        """Return the transformer of `polyamp.demo.digits` with these weights."""

    def weights(self, state: Any) -> list[DenseWeights]:
        """Return the current weights of a state made from `mlp`, in its layout."""

    def sensitive(self) -> Mapping[str, Mapping[str, Callable[[Any], Any]]]:
        """Return family of `rules.float32_ops` -> name -> function of one positive floating array, shape (4, 600).

        Each family has at least one operation if the framework has any. A missing family is a deviation.
        """

    def saturating(self) -> Mapping[str, Callable[[Any], Any]]:
        """Return name -> function of one floating array: the logarithm of a saturating result, or its distance to 1."""

    def inner_products(self) -> Mapping[str, Callable[[Any], Any]]:
        """Return name -> function of one floating array, shape (rows, n): each row's inner product with itself."""

    def matmul(self, left: Any, right: Any) -> Any:
        """Return the matrix product of two framework arrays."""

    def selected(self, values: Any, mask: Any) -> Any:
        """Return the rows of an array at which a boolean array of the batch is True. Raises `UnsupportedError` if
        compiled code must know their number."""

    def outer(self, left: Any, right: Any) -> Any:
        """Return the outer product of two vectors, as `einsum("i,j->ij")` if the framework has it."""

    def gathered(self, layers: Sequence[DenseWeights], rows: Array) -> Any:
        """Return `mlp` with its output read at `rows`, row numbers of the batch, in the network's own dtype."""

    def unusable(self, kind: str) -> Any:
        """Return a model that `init` must reject: `kind` is "empty" (no parameters), "integer" (parameters), "float16"
        (parameters stored in 16 bits), or "complex" (parameters), used if `complex_dense` raises."""

    def complex_dense(self, kernel: Array) -> Any:
        """Return the model `x -> |x @ kernel|²`, for real x, whose one parameter is a complex64 kernel, shape (in, out)
        (S1). Raises `UnsupportedError` if the backend trains no complex parameters."""

    def replicate(
        self, layers: Sequence[DenseWeights], recipe: Recipe, loss_fn: LossFunction, batches: Sequence[Sequence[Any]]
    ) -> list[tuple[Any, StepResult]]:
        """Return (state, last result) of each replica after data-parallel training; `batches[r]` belongs to replica r.

        Raises `UnsupportedError` if the backend does not run replicas; S9's second test is then a deviation.
        """

    def with_head(self, state: Any, head: DenseWeights) -> Any:
        """Return the model of a state made from `mlp` with a new last layer of these weights, for `polyamp.refresh`.
        It is built as users of the framework do: changed in place, or another model around the same arrays."""

    def with_frozen(self, state: Any, numbers: Collection[int]) -> Any:
        """Return the same model with exactly the layers of these numbers frozen. Raises `UnsupportedError` if the
        harness's models cannot freeze."""

    def native_optimizer(self, model: Any, learning_rate: float, kind: str = "sgd") -> Any:
        """Return a native optimizer, as a user would put it into a recipe for this model.

        `kind` is "sgd", "adamw" (decay 0.1) or "halving": plain SGD under the framework's own schedule, which halves
        the rate after every update. Raises `UnsupportedError` if the framework has none of these, or if the user steps
        its schedules.
        """


@runtime_checkable
class HasLibraryHarnesses(Protocol):
    """Optional protocol: a backend that trains models of another library too, such as Keras's on torch."""

    def library_harness(self, library: str) -> Harness:
        """Return the harness of a library's models. Raises `UnsupportedError` for a library that it does not know."""
