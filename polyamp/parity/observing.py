"""`Observer`: what a backend gives so that a training of its models can be watched (`Observes`), and what passes
between. `party` calls it; `backends/*/observe` implement it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from polyamp.contract.report import Operation

if TYPE_CHECKING:
    import numpy as np

    from polyamp.contract.backend import State
    from polyamp.results import LossFunction

    Array = np.ndarray[Any, Any]

What = Literal["input", "output", "cotangent"]
"""A module's output, the gradient of the unscaled loss by it, or, of a module that has no modules in it, the first
floating array that it is called with, which comes right before its output."""
See = Callable[[str, What, "Array", str], None]
"""`see(path, what, array, dtype)`, in the order in which the arrays come to be: outputs as calls end, and cotangents.

- path: of the module, as `Converter.inventory` spells it, "" of the model itself; the second call of a module in one
  pass is "path#2", the third "path#3".
- array: on the host, in the framework's own layout; float32 or float64, whatever it was.
- dtype: what it was.
"""
Draws = Callable[[tuple[int, ...]], "Array"]
"""`draws(shape)`: the next uniform numbers of [0, 1), float32, the same in every framework."""


class Watched(NamedTuple):
    """One forward and backward pass of `loss_fn`.

    Attributes:
        loss: unscaled, a Python number.
        gradients: name of a trainable leaf (`Inventory`) -> gradient of the unscaled loss in the leaf's shape, float32
            (float64 of a float64 model); None where the loss does not depend on it.
        operations: the operations that ran, by module path, as `polyamp.explain` lists them; empty where the framework
            does not show them.
        unseen: why modules inside of the model do not show their outputs (a compiled model); "" where they do.
    """

    loss: float
    gradients: Mapping[str, Array | None]
    operations: Sequence[Operation] = ()
    unseen: str = ""


class Observer(Protocol):
    """What the comparison of two trainings asks of a framework."""

    def working(self, model: Any, *, wide: bool = False, inference: bool = False) -> AbstractContextManager[Any]:
        """A block with a model to train, while the given one stays as it is: a copy, or where there are none (Keras)
        the model itself, in which every variable and setting is put back at the end of the block.

        It has the model's values, paths, mode (training or not) and wrappers (`torch.compile`), and trains nothing
        that the given one does not.

        Args:
            model: as `polyamp.init` takes it.
            wide: in float64, parameters and statistics; all that happens inside of the block may be in float64.
            inference: as in inference (running statistics are used, no dropout) where a call does not say otherwise.

        Raises:
            UnsupportedError: `wide`, and the framework or the model cannot.
            ModelError: it cannot be copied.
        """

    def still(self, model: Any, draws: Draws | None) -> AbstractContextManager[None]:
        """A block in which a model, and functions of its framework, draw no random numbers.

        Args:
            model: one that `working` gave.
            draws: None: dropout passes its input on. Else each random mask or number is made of these, one call of
                `draws` for each, in the order in which the program asks; whoever drops keeps where a draw is >= its
                rate, and multiplies by 1 / (1 - rate).
        """

    def watch(self, state: State, loss_fn: LossFunction, batch: Any, see: See) -> Watched:
        """One pass of `loss_fn` on the state's model under its policy, forward and backward, as `value_and_grad` makes
        it; the state is as before, random streams included.

        Args:
            state: what `polyamp.init` made of a model that `working` gave.
            loss_fn: the loss.
            batch: NumPy, whole: micro-batches are not made of it.
            see: gets what every module gave. A model whose inner modules cannot be seen shows its own output alone.
        """


@runtime_checkable
class Observes(Protocol):
    """A backend whose models' training can be watched."""

    @property
    def observer(self) -> Observer:
        """What watches it."""
