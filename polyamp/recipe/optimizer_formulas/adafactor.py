"""`Adafactor`: second moments of matrices from the means of their rows and columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from polyamp.array_namespace import ArrayNamespace
from polyamp.errors import RecipeError
from polyamp.recipe.groups import Group
from polyamp.recipe.optimizer_formulas.kernel_layout import KERNEL_LAYOUTS, KernelLayout, kernel_layout, matrix_axes
from polyamp.recipe.optimizer_spec import (
    NativeOptimizers,
    ParameterFacts,
    Shape,
    Slots,
    SlotSelector,
    Spec,
    scalar_shape,
)
from polyamp.schedules import Schedule


class Adafactor(Spec):
    """Adafactor (arxiv.org/abs/1804.04235) with torch.optim.Adafactor's formula: no first moment.

    The step is the gradient over the root of its second moment, limited to a root mean square of `d`, times the
    parameter's own root mean square (at least `eps[1]`), times min(learning_rate, 1 / sqrt(n)) in the n-th update. A
    parameter with two axes or more keeps one mean for each row and one for each column instead of a second moment.

    Rows and columns are a kernel's inputs and outputs in every framework, so that it trains alike in all; torch's class
    takes the last two axes, for a convolution those of the positions. Other differences: the paper and optax add
    `eps[0]` to the squared gradient, torch limits the root from below; optax.adafactor factors the two longest axes,
    only those of 128 and more, and does not limit its rate by 1 / sqrt(n); Keras's Adafactor has the paper's epsilon.
    torch's `eps=(None, 1e-3)` is that of the dtype, here float32's for every dtype.

    Args:
        learning_rate: largest relative step, a number or a schedule.
        beta2_decay: the second moment's decay is `1 - n**beta2_decay`; at most 0.
        eps: least root of the second moment, and least root mean square of a parameter.
        d: largest root mean square of a step before both factors, at least 1.
        weight_decay: decoupled, as in AdamW.
        layout: order of a kernel's axes, "out_in" or "in_out"; "auto" takes that of the parameter's library.

    >>> import polyamp
    >>> polyamp.adafactor().slots
    ('row_var', 'col_var', 'variance')
    """

    tag: ClassVar[str] = "adafactor"
    slot_names: ClassVar[tuple[str, ...]] = ("row_var", "col_var", "variance")
    has_decoupled_decay: ClassVar[bool] = True
    is_elementwise: ClassVar[bool] = False
    depends_on_parameter: ClassVar[bool] = True
    slot_shapes: ClassVar[Mapping[str, Callable[[Shape], Shape]]] = dict.fromkeys(
        ("row_var", "col_var", "variance"), scalar_shape
    )
    row_and_column_slots: ClassVar[tuple[str, ...]] = ("row_var", "col_var")
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"layout": KERNEL_LAYOUTS}
    native: ClassVar[NativeOptimizers] = {}

    learning_rate: float | Schedule = 1e-2
    beta2_decay: float = -0.8
    eps: tuple[float, float] = (2.0**-23, 1e-3)
    d: float = 1.0
    weight_decay: float = 0.0
    layout: KernelLayout = "auto"
    groups: Sequence[Group] = ()

    def _check_hyperparameter(self, name: str, value: Any) -> None:
        if name == "beta2_decay":
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not -math.inf < value <= 0.0:
                raise RecipeError(f"beta2_decay must be a finite number of at most 0. Received: beta2_decay={value!r}.")
            return
        super()._check_hyperparameter(name, value)
        if name == "d" and value < 1.0:
            raise RecipeError(f"d must be at least 1. Received: d={value!r}.")

    def slot_shape(self, slot: str, shape: Shape) -> Shape:
        if len(shape) < 2:
            return shape if slot == "variance" else ()
        if slot == "variance":
            return ()
        first, second = matrix_axes(self.layout, len(shape))
        mean_axis = second if slot == "row_var" else first
        return (*shape[:mean_axis], 1, *shape[mean_axis + 1 :])

    def parameter_settings(self, parameter: ParameterFacts) -> Mapping[str, Any]:
        return {"layout": kernel_layout(parameter)} if self.layout == "auto" else {}

    def corrections(self, xp: ArrayNamespace, rate: Any, count: Any) -> Slots:
        return {
            "share": xp.power(count, self.beta2_decay),
            "relative": xp.minimum(1.0 / xp.sqrt(count), xp.asarray(1.0, count) * rate),
        }

    def step(
        self, xp: ArrayNamespace, param: Any, grad: Any, slots: Slots, numbers: Slots, keep: SlotSelector
    ) -> tuple[Any, Slots]:
        share, shape = numbers["share"], tuple(param.shape)
        if len(shape) < 2:
            new = keep({**slots, "variance": _move(slots["variance"], grad * grad, share)})
            estimate, whole = new["variance"], grad
        else:
            first, second = matrix_axes(self.layout, len(shape))
            whole = xp.gather(grad)
            squares = whole * whole
            rows, columns = xp.mean(squares, second), xp.mean(squares, first)
            new = {"row_var": _move(slots["row_var"], rows, share), "col_var": _move(slots["col_var"], columns, share)}
            new = keep({**new, "variance": slots["variance"]})
            mean = xp.mean(new["row_var"], first)
            estimate = new["row_var"] * new["col_var"] / xp.maximum(mean, xp.asarray(self.eps[0], mean))
        change = whole / xp.sqrt(xp.maximum(estimate, xp.asarray(self.eps[0] ** 2, estimate)))
        root = math.sqrt(max(math.prod(shape), 1))
        size, length = xp.norm(change) / (root * self.d), xp.norm(param) / root
        limited = change / xp.maximum(size, xp.asarray(1.0, size))
        relative = numbers["relative"] * xp.maximum(length, xp.asarray(self.eps[1], length))
        return xp.scatter(relative * limited, param), new


adafactor = Adafactor


def _move(mean: Any, value: Any, share: Any) -> Any:
    return mean + share * (value - mean)
