"""What `scaler.report()` returns: which gradients made a step be skipped, and how many of their numbers.

Called by `GradScaler`, which adds one `Evidence` per optimizer step.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from polyamp_torch.arrays import dtype_name
from polyamp_torch.own_loop.scaler_gradients import parameters_of


class NonFinite(NamedTuple):
    """One parameter whose gradient is not finite.

    Attributes:
        name: its name in the module given to `watch`, else in the optimizer, else "group 0, parameter 3".
        shape: of the parameter.
        dtype: of the gradient, such as "float32".
        inf: how many of the unscaled gradient's elements are infinite; a complex one is if either part is. Of a
            sharded gradient, the elements that this process holds.
        nan: how many are NaN.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    inf: int
    nan: int


@dataclasses.dataclass(frozen=True)
class SkipReport:
    """The gradients that were not finite in the last iteration; empty if nothing was skipped. Printed, it is a table.

    Attributes:
        rows: one per parameter, in the optimizers' order.
        gradients: how many gradients were looked at.
        scale: the loss scale that they were made with, or None if nothing was skipped.
        gone: True when a step was skipped on the device and its gradients were cleared or made anew before the report
            was asked for, so that they can no longer be counted.
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
        return "\n".join([head, *_table(self.rows)]) if self.rows else head


def _table(rows: tuple[NonFinite, ...]) -> list[str]:
    cells = [("parameter", "shape", "dtype", "inf", "nan")]
    cells += [(row.name, str(row.shape), row.dtype, str(row.inf), str(row.nan)) for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(5)]
    left = ["  ".join(cell.ljust(width) for cell, width in zip(line[:3], widths, strict=False)) for line in cells]
    right = ["  ".join(cell.rjust(width) for cell, width in zip(line[3:], widths[3:], strict=True)) for line in cells]
    return [f"{a}  {b}" for a, b in zip(left, right, strict=True)]


class Evidence:
    """One optimizer step under a flag: whether it was skipped, and by which gradients.

    Args:
        optimizer: returns the optimizer that stepped, or did not; None once it is gone.
        found: its flag, a float scalar on the device that is above 0 if the step was skipped.
        scale: the loss scale of its gradients, float32 scalar.
        divisor: what the gradients are still to be divided by, or None.
        calls: how often `scale()` had been called.
        names: what the parameters are called.
    """

    def __init__(
        self,
        optimizer: Callable[[], Any],
        found: torch.Tensor,
        scale: torch.Tensor,
        divisor: torch.Tensor | None,
        calls: int,
        names: Names,
    ) -> None:
        self._optimizer = optimizer
        self._found = found
        self._scale = scale
        self._divisor = divisor
        self._calls = calls
        self._names = names
        self._skipped: bool | None = None
        self._report: SkipReport | None = None

    def keep(self, scale: torch.Tensor, old: torch.Tensor) -> None:
        """Where the step used this tensor of the scale, use its old value from now on."""
        self._scale = old if self._scale is scale else self._scale
        self._divisor = old if self._divisor is scale else self._divisor

    def decided(self, skipped: bool) -> None:
        """The host knows what became of the step: count now, while the gradients are there."""
        self._skipped = skipped
        self.report(self._calls)

    def skipped(self) -> bool:
        """Whether the step was skipped; waits for the device the first time."""
        if self._skipped is None:
            self._skipped = bool(self._found.item() > 0.0)
        return self._skipped

    def report(self, calls: int) -> SkipReport:
        """The gradients counted; `calls` of `scale()` since then mean that they may be others."""
        if not self.skipped():
            return SkipReport()
        if self._report is None:
            optimizer = self._optimizer()
            scale = self._scale.item()
            if optimizer is None or calls != self._calls or not _has_gradients(optimizer):
                return SkipReport(scale=scale, gone=True)
            found, total = counted(optimizer, self._divisor, self._names)
            self._report = SkipReport(tuple(found), total, scale)
        return self._report


def joined(reports: Iterable[SkipReport]) -> SkipReport:
    """The reports of one iteration's optimizers as one."""
    skipped = [report for report in reports if report.scale is not None]
    if not skipped:
        return SkipReport()
    return SkipReport(
        rows=tuple(row for report in skipped for row in report),
        gradients=sum(report.gradients for report in skipped),
        scale=skipped[-1].scale,
        gone=any(report.gone for report in skipped),
    )


class Names:
    """Names for parameters: of the modules that are watched, kept by weak references."""

    def __init__(self) -> None:
        self._modules: list[weakref.ref[nn.Module]] = []

    def add(self, module: nn.Module) -> None:
        """Take names from this module too."""
        self._modules.append(weakref.ref(module))

    def known(self) -> dict[int, str]:
        """`id` of a parameter -> its name, torch's `.`-separated path; the module watched first names a shared one."""
        modules = [module for reference in self._modules if (module := reference()) is not None]
        return {id(p): name for module in reversed(modules) for name, p in module.named_parameters()}

    def of(self, optimizer: Any) -> list[str]:
        """A name for every parameter of an optimizer, in its order."""
        known, found = self.known(), []
        for number, group in enumerate(optimizer.param_groups):
            given = group.get("param_names")
            for index, p in enumerate(group["params"]):
                otherwise = given[index] if given else f"group {number}, parameter {index}"
                found.append(known.get(id(p), otherwise))
        return found


def _has_gradients(optimizer: Any) -> bool:
    return any(p.grad is not None for p in parameters_of(optimizer))


@torch.no_grad()
def counted(optimizer: Any, divisor: torch.Tensor | None, names: Names) -> tuple[list[NonFinite], int]:
    """The gradients that are not finite, divided by `divisor` where one is given; and how many there are.

    One quotient at a time is held, and the counts are read in one go.
    """
    held = [(p, p.grad) for p in parameters_of(optimizer)]
    counts = [(i, _inf_and_nan(_numbers(grad, divisor))) for i, (_, grad) in enumerate(held) if grad is not None]
    home = counts[0][1].device
    numbers = torch.stack([count.to(home) for _, count in counts]).tolist()
    bad = [(i, inf, nan) for (i, _), (inf, nan) in zip(counts, numbers, strict=True) if inf or nan]
    called = names.of(optimizer) if bad else []
    rows = []
    for i, inf, nan in bad:
        p, grad = held[i]
        assert grad is not None
        rows.append(NonFinite(called[i], tuple(p.shape), dtype_name(grad.dtype), inf, nan))
    return rows, len(counts)


def _inf_and_nan(values: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.isinf(values).sum(), torch.isnan(values).sum()])


def _numbers(grad: torch.Tensor, divisor: torch.Tensor | None) -> torch.Tensor:
    """The stored values of a gradient, unscaled; of a sharded one (a DTensor), this process's part."""
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
