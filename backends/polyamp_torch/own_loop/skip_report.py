"""`SkipReport`, the result of `scaler.report()`: the gradients that caused a skipped step, with counts.

`GradScaler` adds one `SkipEvidence` per optimizer step.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from polyamp.display import table_lines
from polyamp_torch.arrays import dtype_name
from polyamp_torch.own_loop.gradients import has_gradients, optimizer_parameters


class NonFinite(NamedTuple):
    """Parameter whose gradient is not finite.

    Attributes:
        name: its name in the module given to `watch`, else in the optimizer, else "group 0, parameter 3".
        shape: of the parameter.
        dtype: of the gradient, such as "float32".
        inf: number of infinite elements of the unscaled gradient; a complex one is infinite if either part is. Of a
            sharded gradient, the local elements count.
        nan: number of NaN elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    inf: int
    nan: int


@dataclasses.dataclass(frozen=True)
class SkipReport:
    """Non-finite gradients of the last iteration; empty if nothing was skipped. It prints as a table.

    Attributes:
        rows: one per parameter, in the optimizers' order.
        gradients: number of gradients that were checked.
        scale: the loss scale of the gradients, or None if nothing was skipped.
        gone: True if a step was skipped on the device and its gradients were cleared or recomputed before the report
            was requested, so that they can no longer be counted.
    """

    rows: tuple[NonFinite, ...] = ()
    gradients: int = 0
    scale: float | None = None
    gone: bool = False

    def __iter__(self) -> Iterator[NonFinite]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        if self.scale is None:
            return "No step was skipped."
        head = f"Skipped at loss scale {self.scale:g}: "
        if self.gone:
            head += "some gradients are gone. Call report() before zero_grad() and before the next scale(). "
        head += f"{len(self.rows)} of {self.gradients} gradients are not finite."
        return "\n".join([head, *_format_table(self.rows)]) if self.rows else head


def non_finite_names(report: SkipReport) -> list[str]:
    """Return the names of the parameters with gradients that are not finite, for the error about a stuck scale."""
    return [row.name for row in report] or ["unknown, as the gradients are gone"]


def _format_table(rows: tuple[NonFinite, ...]) -> list[str]:
    cells = [("parameter", "shape", "dtype", "inf", "nan")]
    cells += [(row.name, str(row.shape), row.dtype, str(row.inf), str(row.nan)) for row in rows]
    return table_lines(cells, right=2)


@dataclasses.dataclass(eq=False)
class SkipEvidence:
    """Record of one optimizer step and its flag: whether it was skipped, and because of which gradients.

    Attributes:
        optimizer: returns the optimizer of the step; None once it is deleted.
        found: its flag, a float scalar on the device that is above 0 if the step was skipped.
        scale: the loss scale of its gradients, float32 scalar.
        divisor: the remaining divisor of the gradients, or None.
        calls: the number of calls of `scale()` before the step.
        names: the names of the parameters.
    """

    optimizer: Callable[[], Any]
    found: torch.Tensor
    scale: torch.Tensor
    divisor: torch.Tensor | None
    calls: int
    names: ParameterNames
    _skipped: bool | None = None
    _report: SkipReport | None = None

    def preserve_scale(self, scale: torch.Tensor, old: torch.Tensor) -> None:
        """Replace this tensor of the scale by its old value, if the step used it."""
        self.scale = old if self.scale is scale else self.scale
        self.divisor = old if self.divisor is scale else self.divisor

    def record_decision(self, skipped: bool) -> None:
        """Record the host's decision, and count now, while the gradients exist."""
        self._skipped = skipped
        self.report(self.calls)

    def was_skipped(self) -> bool:
        """Return whether the step was skipped; waits for the device the first time."""
        if self._skipped is None:
            self._skipped = bool(self.found.item() > 0.0)
        return self._skipped

    def report(self, calls: int) -> SkipReport:
        """Return the counts; `gone` if `calls` shows that `scale()` ran since, as the gradients may be others then."""
        if not self.was_skipped():
            return SkipReport()
        if self._report is None:
            optimizer = self.optimizer()
            scale = self.scale.item()
            if optimizer is None or calls != self.calls or not has_gradients(optimizer):
                return SkipReport(scale=scale, gone=True)
            found, total = count_non_finite(optimizer, self.divisor, self.names)
            self._report = SkipReport(tuple(found), total, scale)
        return self._report


def merge_reports(reports: Iterable[SkipReport]) -> SkipReport:
    """Merge the reports of one iteration's optimizers."""
    skipped = [report for report in reports if report.scale is not None]
    if not skipped:
        return SkipReport()
    return SkipReport(
        rows=tuple(row for report in skipped for row in report),
        gradients=sum(report.gradients for report in skipped),
        scale=skipped[-1].scale,
        gone=any(report.gone for report in skipped),
    )


class ParameterNames:
    """Names of the parameters of watched modules, which it references weakly."""

    def __init__(self) -> None:
        self._modules: list[weakref.ref[nn.Module]] = []

    def add(self, module: nn.Module) -> None:
        """Add the names of this module."""
        self._modules.append(weakref.ref(module))

    def known(self) -> dict[int, str]:
        """Map the `id` of a parameter to its `.`-separated path; the module watched first names a shared one."""
        modules = [module for reference in self._modules if (module := reference()) is not None]
        return {id(p): name for module in reversed(modules) for name, p in module.named_parameters()}

    def of(self, optimizer: Any) -> list[str]:
        """Return a name for every parameter of an optimizer, in its order."""
        known, found = self.known(), []
        for number, group in enumerate(optimizer.param_groups):
            given = group.get("param_names")
            for index, p in enumerate(group["params"]):
                otherwise = given[index] if given else f"group {number}, parameter {index}"
                found.append(known.get(id(p), otherwise))
        return found


@torch.no_grad()
def count_non_finite(
    optimizer: Any, divisor: torch.Tensor | None, names: ParameterNames
) -> tuple[list[NonFinite], int]:
    """Return the gradients that are not finite after division by `divisor`, if given; and the number of all gradients.

    One quotient exists at a time, and all counts are read at once.
    """
    pairs = [(p, p.grad) for p in optimizer_parameters(optimizer)]
    counts = [
        (i, _inf_and_nan(_unscaled_values(grad, divisor))) for i, (_, grad) in enumerate(pairs) if grad is not None
    ]
    home = counts[0][1].device
    numbers = torch.stack([count.to(home) for _, count in counts]).cpu().tolist()
    bad = [(i, inf, nan) for (i, _), (inf, nan) in zip(counts, numbers, strict=True) if inf or nan]
    called = names.of(optimizer) if bad else []
    rows = []
    for i, inf, nan in bad:
        p, grad = pairs[i]
        assert grad is not None
        rows.append(NonFinite(called[i], tuple(p.shape), dtype_name(grad.dtype), inf, nan))
    return rows, len(counts)


def _inf_and_nan(values: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.isinf(values).sum(), torch.isnan(values).sum()])


def _unscaled_values(grad: torch.Tensor, divisor: torch.Tensor | None) -> torch.Tensor:
    """Return the stored values of a gradient, unscaled; of a sharded one (a DTensor), the local shard."""
    if hasattr(grad, "to_local"):
        grad = grad.to_local()
    if grad.layout is torch.sparse_coo:
        grad = grad.coalesce().values()
    elif grad.layout is not torch.strided:
        grad = grad.values()
    if divisor is None:
        return grad
    by = divisor.to(grad.device)
    if grad.is_complex():  # complex division would turn inf into NaN
        return torch.view_as_complex(torch.view_as_real(grad.resolve_conj()) / by)
    return grad / by
