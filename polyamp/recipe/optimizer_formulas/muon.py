"""`Muon`: orthogonal steps for matrices, AdamW's for every other parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

from polyamp.array_namespace import ArrayNamespace
from polyamp.errors import RecipeError
from polyamp.recipe.groups import Group
from polyamp.recipe.optimizer_formulas.adam import adam_corrections, moments
from polyamp.recipe.optimizer_formulas.kernel_layout import KERNEL_LAYOUTS, KernelLayout, kernel_layout
from polyamp.recipe.optimizer_spec import (
    NativeOptimizers,
    ParameterFacts,
    Shape,
    Slots,
    SlotSelector,
    Spec,
    check_number,
    scalar_shape,
)
from polyamp.schedules import Schedule, is_schedule

Scale = Literal["original", "moonlight"]
Method = Literal["auto", "muon", "adamw"]
IterationDtype = Literal["auto", "bfloat16", "float32", "float64"]

_LEAST_NORM = 1e-7  # torch.optim.Muon's eps


class Muon(Spec):
    """Muon (kellerjordan.github.io/posts/muon) with torch.optim.Muon's formula; AdamW for what is not a matrix.

    For a matrix, in each update, with the gradient g:

        momentum = momentum * m + (1 - m) * g
        step     = m * momentum + (1 - m) * g      (Nesterov; without it, momentum)
        X        = step / max(|step|, 1e-7)        (Frobenius norm; transposed if it has more rows than columns)
        X        = a X + (b A + c A A) X, A = X X'  (`ns_steps` times, with a, b, c = ns_coefficients)
        matrix   = matrix * (1 - learning_rate * weight_decay) - learning_rate * factor * X

    The factor is sqrt(max(1, outputs / inputs)) for "original", 0.2 * sqrt(max(outputs, inputs)) for "moonlight"
    (arxiv.org/abs/2502.16982), with which AdamW's rates fit. Kernels of Keras and flax are (inputs, outputs).

    A matrix is a parameter with exactly two axes that is not the table of an embedding. Biases, norms, embeddings,
    convolutions and stacked kernels take AdamW's update with `betas`, `eps` and the same decay. The last layer is a
    matrix: authors of Muon leave it to AdamW, which a group does, as it does for any matrix.

    Differences: torch's class takes matrices only, and iterates in bfloat16 always. optax.contrib.muon corrects its
    momentum's bias, also inside Nesterov's step, and iterates in the gradient's dtype; Keras's Muon has 0.2 *
    sqrt(max) by default, and leaves a last layer to AdamW only if it is named. Both accept convolutions on request.

    Args:
        learning_rate: of the matrices; of all parameters unless `adamw_learning_rate`.
        momentum: m, at least 0 and below 1.
        weight_decay: decoupled, for all parameters.
        nesterov: see above.
        ns_coefficients: a, b, c.
        ns_steps: number of iterations, from 1 to 99.
        scale: "original" or "moonlight".
        ns_dtype: dtype of the iterations: "bfloat16", "float32" or "float64". "auto" takes the policy's compute dtype,
            but float32 for float16.
        method: "muon" or "adamw" for all parameters; for groups. "auto": see above.
        layout: order of a matrix's axes, "out_in" or "in_out"; "auto" takes that of the parameter's library.
        adamw_learning_rate: rate of the parameters that AdamW updates, a number or a schedule.
        betas, eps: AdamW's.

    Raises:
        RecipeError: an impossible value. At `init`: "muon" for a parameter with another number of axes, or a matrix of
            which cannot be told whether it is an embedding.

    >>> import polyamp
    >>> optimizer = polyamp.muon(
    ...     0.02, adamw_learning_rate=3e-4, groups=[polyamp.Group("head/**", method="adamw")]
    ... )
    >>> optimizer.slots
    ('momentum', 'exp_avg_sq')
    """

    tag: ClassVar[str] = "muon"
    slot_names: ClassVar[tuple[str, ...]] = ("momentum", "exp_avg_sq")
    has_decoupled_decay: ClassVar[bool] = True
    is_elementwise: ClassVar[bool] = False
    depends_on_parameter: ClassVar[bool] = True
    slot_shapes: ClassVar[Mapping[str, Callable[[Shape], Shape]]] = {"exp_avg_sq": scalar_shape}
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "scale": get_args(Scale),
        "method": get_args(Method),
        "layout": KERNEL_LAYOUTS,
        "ns_dtype": get_args(IterationDtype),
    }
    native: ClassVar[NativeOptimizers] = {}

    learning_rate: float | Schedule = 1e-3
    momentum: float = 0.95
    weight_decay: float = 0.1
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    ns_steps: int = 5
    scale: Scale = "original"
    ns_dtype: IterationDtype = "auto"
    method: Method = "auto"
    layout: KernelLayout = "auto"
    adamw_learning_rate: float | Schedule | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    groups: Sequence[Group] = ()

    def _check_hyperparameter(self, name: str, value: Any) -> None:
        if name == "ns_coefficients":
            numbers = isinstance(value, tuple) and [isinstance(item, float) and math.isfinite(item) for item in value]
            if numbers != [True] * 3:
                raise RecipeError(f"ns_coefficients must be three finite floats. Received: ns_coefficients={value!r}.")
        elif name == "ns_steps":
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 99:
                raise RecipeError(f"ns_steps must be a whole number from 1 to 99. Received: ns_steps={value!r}.")
        elif name == "adamw_learning_rate":
            if value is not None and not is_schedule(value):
                check_number(name, value)
        else:
            super()._check_hyperparameter(name, value)

    def slot_shape(self, slot: str, shape: Shape) -> Shape:
        return () if slot == "exp_avg_sq" and self._is_matrix(shape) else shape

    def parameter_settings(self, parameter: ParameterFacts) -> Mapping[str, Any]:
        method, has_two_axes = self.method, parameter.dimensions == 2
        if method == "muon" and not has_two_axes:
            raise RecipeError(
                f"method='muon' is for parameters with two axes. Received: {parameter.path!r} with "
                f"{parameter.dimensions}. Leave it out: AdamW updates such a parameter."
            )
        if method == "auto" and has_two_axes and parameter.is_embedding is None:
            raise RecipeError(
                f"muon: whether {parameter.path!r} is the table of an embedding cannot be told from its name, and its "
                f"framework keeps no module class. Say it: polyamp.Group({parameter.path!r}, method='muon') or 'adamw'."
            )
        if method == "auto":
            method = "muon" if has_two_axes and not parameter.is_embedding else "adamw"
        found: dict[str, Any] = {"method": method}
        if self.layout == "auto":
            found["layout"] = kernel_layout(parameter)
        if self.ns_dtype == "auto":
            found["ns_dtype"] = "float32" if parameter.compute == "float16" else parameter.compute
        if method == "adamw" and self.adamw_learning_rate is not None:
            found["learning_rate"] = self.adamw_learning_rate
        return found

    def _is_matrix(self, shape: Shape) -> bool:
        return self.method == "muon" or (self.method == "auto" and len(shape) == 2)

    def corrections(self, xp: ArrayNamespace, rate: Any, count: Any) -> Slots:
        own = adam_corrections(xp, self.betas, rate, count)
        return {"root": own["root"], "adamw_rate": own["rate"]}

    def step(
        self, xp: ArrayNamespace, param: Any, grad: Any, slots: Slots, numbers: Slots, keep: SlotSelector
    ) -> tuple[Any, Slots]:
        if not self._is_matrix(tuple(param.shape)):
            mean, square = moments(self.betas, grad, slots["momentum"], slots["exp_avg_sq"])
            new = keep({"momentum": mean, "exp_avg_sq": square})
            root = xp.sqrt(new["exp_avg_sq"]) / numbers["root"] + self.eps
            return numbers["adamw_rate"] * (new["momentum"] / root), new
        m = self.momentum
        new = keep({"momentum": m * slots["momentum"] + (1.0 - m) * grad, "exp_avg_sq": slots["exp_avg_sq"]})
        step = m * new["momentum"] + (1.0 - m) * grad if self.nesterov else new["momentum"]
        made = xp.scatter(self._orthogonalize(xp, xp.gather(step)), param)
        return numbers["rate"] * self._factor(tuple(param.shape)) * made, new

    def _orthogonalize(self, xp: ArrayNamespace, matrix: Any) -> Any:
        a, b, c = self.ns_coefficients
        rows, columns = matrix.shape
        norm = xp.norm(matrix)
        x = matrix / xp.maximum(norm, xp.asarray(_LEAST_NORM, norm))
        x = xp.astype(
            xp.swapaxes(x, 0, 1) if rows > columns else x, "float32" if self.ns_dtype == "auto" else self.ns_dtype
        )
        for _ in range(self.ns_steps):
            gram = xp.matmul(x, xp.swapaxes(x, 0, 1))
            x = a * x + xp.matmul(b * gram + c * xp.matmul(gram, gram), x)
        return xp.astype(xp.swapaxes(x, 0, 1) if rows > columns else x, matrix)

    def _factor(self, shape: Shape) -> float:
        rows, columns = shape
        if self.scale == "moonlight":
            return 0.2 * math.sqrt(max(rows, columns))
        outputs, inputs = (columns, rows) if self.layout == "in_out" else (rows, columns)
        return math.sqrt(max(1.0, outputs / inputs)) if inputs else 1.0


muon = Muon
