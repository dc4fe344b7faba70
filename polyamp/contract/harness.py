"""`Harness`: the few models and functions that a backend offers so that one suite can test every framework.

A backend's `testing()` returns one. All weights are given as NumPy arrays in one layout, dense kernels as (in, out), so
that the same numbers reach every framework.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np

    from polyamp.recipe.recipe import Recipe
    from polyamp.results import LossFunction, StepResult

    Array = np.ndarray[Any, Any]

Observe = Callable[[str], None]
"""Called with the canonical dtype name of an inner result while the model runs (or is traced)."""


class Layer(NamedTuple):
    """A dense layer's weights.

    Attributes:
        kernel: shape (in, out); float32, or the dtype in which the model is to store its parameters.
        bias: shape (out,), of the same dtype.
    """

    kernel: Array
    bias: Array


class Harness(Protocol):
    """What the conformance suite, the parity runner and the demo need of a backend beyond `Backend` itself."""

    def array(self, value: Array) -> Any:
        """A NumPy array as the framework's own, same dtype."""

    def float64(self) -> AbstractContextManager[Any]:
        """A block in which models, states and batches may be float64; nothing where they always may. A framework that
        has none raises `UnsupportedError`, and `s01_float64` is a deviation."""

    def mlp(self, layers: Sequence[Layer], *, observe: Observe | None = None) -> Any:
        """dense -> relu -> ... -> dense, as the framework's customary model class.

        The layers' module paths end in `dense0`, `dense1`, ...; `observe` gets the dtype of each dense result.
        """

    def branches(self, layers: Sequence[Layer]) -> Any:
        """Dense layers side by side, named as in `mlp`: `model(x)` is the sequence `(dense0(x), dense1(x), ...)`, so
        that a loss can leave some out (S23)."""

    def normalized_mlp(self, layers: Sequence[Layer]) -> Any:
        """dense -> batch normalisation with running statistics -> relu -> dense, in training mode (two layers)."""

    def dropout_mlp(self, layers: Sequence[Layer]) -> tuple[Any, dict[str, Any]] | None:
        """dense -> relu -> dropout of a half of the features -> dense in training mode (two layers), and the options
        that `polyamp.init` needs for its random streams; None where models have no randomness (S12)."""

    def constrained_mlp(self, layers: Sequence[Layer], limit: float) -> Any:
        """The model of `mlp`, whose forward pass first clips the kernel of dense0 to [-limit, limit], in place, as a
        max-norm constraint does (S12); None where models cannot write to their parameters."""

    def digits(self, weights: Mapping[str, Array]) -> Any:
        """The transformer of `polyamp.demo.digits` with these weights."""

    def weights(self, state: Any) -> list[Layer]:
        """The current weights of a state made from `mlp`, in its layout."""

    def sensitive(self) -> Mapping[str, Mapping[str, Callable[[Any], Any]]]:
        """Family of `rules.sensitive` -> name -> function of one floating array, shape (4, 600), positive values.

        Of each family at least one operation that the framework has. A family that is missing is a deviation.
        """

    def saturating(self) -> Mapping[str, Callable[[Any], Any]]:
        """Name -> function of one floating array: a logarithm, or a difference from 1, of a saturating result."""

    def inner_products(self) -> Mapping[str, Callable[[Any], Any]]:
        """Name -> function of one floating array, shape (rows, n): each row's inner product with itself."""

    def matmul(self, left: Any, right: Any) -> Any:
        """Matrix product of two framework arrays."""

    def selected(self, values: Any, mask: Any) -> Any:
        """The rows of an array at which a boolean array of the batch is True. Raises `UnsupportedError` where compiled
        code must know their number."""

    def outer(self, left: Any, right: Any) -> Any:
        """Outer product of two vectors, written as `einsum("i,j->ij")` where the framework has it."""

    def gathered(self, layers: Sequence[Layer], rows: Array) -> Any:
        """The model of `mlp` whose output is read at `rows`, row numbers of the batch, in the network's own dtype."""

    def unusable(self, kind: str) -> Any:
        """A model that must be refused: `kind` is "empty" (no parameters), "integer" (parameters), "float16"
        (parameters stored in 16 bits), or "complex" (parameters), which is asked for where `complex_dense` raises."""

    def complex_dense(self, kernel: Array) -> Any:
        """The model `x -> |x @ kernel|²`, of real x, with a complex64 kernel, shape (in, out), as its one parameter
        (S1). Raises `UnsupportedError` where the backend trains no complex parameters."""

    def replicate(
        self, layers: Sequence[Layer], recipe: Recipe, loss_fn: LossFunction, batches: Sequence[Sequence[Any]]
    ) -> list[tuple[Any, StepResult]]:
        """(state, last result) of each replica after training an MLP data-parallel; `batches[r]` is replica r's.

        Raises `UnsupportedError` where the backend does not run replicas; S9's second test is then a deviation.
        """

    def with_head(self, state: Any, head: Layer) -> Any:
        """The model of a state made from `mlp` with a new last layer of these weights, as a user of the framework
        replaces it: changed in place, or another model around the same arrays. What `polyamp.refresh` is given."""

    def with_frozen(self, state: Any, numbers: Collection[int]) -> Any:
        """The same model with exactly the layers of these numbers frozen. Raises `UnsupportedError` where the
        harness's models cannot freeze."""

    def native_optimizer(self, model: Any, learning_rate: float, kind: str = "sgd") -> Any:
        """An optimizer of the framework's own, as a user would put it into a recipe for this model.

        `kind` is "sgd", "adamw" (decay 0.1) or "halving": plain SGD under the framework's own schedule,
        which halves the rate after every update. Raises `UnsupportedError` where the framework has none of these, or
        where its schedules are stepped by the user.
        """
