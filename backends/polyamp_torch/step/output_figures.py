"""`OutputHooks`: figures of modules' outputs in the forward passes of a step, for a monitor (S35).

Nothing here waits for the device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from polyamp.monitor.slots import (
    MonitorSelection,
    OutputFigures,
    OutputLimits,
    check_selected_outputs,
    output_limits,
)
from polyamp.results import StepResult
from polyamp_torch.arrays import output_tensors
from polyamp_torch.compat import (
    CompiledCallHook,
    compiled_call_of_module,
    has_active_transforms,
    is_in_backward,
    local_tensor_of,
    without_function_modes,
)
from polyamp_torch.step.state import TorchState

_SUMS = 6
"""Sums of `OutputFigures`."""


class OutputHooks:
    """Records the outputs of a model's modules while it is `installed`, by forward hooks.

    A module that runs again in a backward pass, as under activation checkpointing, is counted once. What
    `torch.compile` made one function of is a module, and the modules in it are not seen. Calls inside of
    `torch.func`'s transformations are left out.

    Args:
        state: the state, whose model's modules are recorded.
        selection: which of them.
        traced: whether the forward passes are traced into one graph, in which no module runs again.

    Raises:
        ArgumentError: the selection matches no module.
    """

    def __init__(self, state: TorchState, selection: MonitorSelection, *, traced: bool = False) -> None:
        seen = state.reader.output_modules()
        check_selected_outputs(selection, seen)
        self._state = state
        self._limits = output_limits(selection.compute)
        self._modules = {path: part for path, part in seen.items() if selection.measures_output_of(path)}
        self._hooks = {path: self._hook(path) for path in self._modules}
        self._found: dict[str, OutputFigures] = {}
        self._kept: dict[str, OutputFigures] = {}
        self._traced = traced

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Context manager in which calls of the modules are recorded."""
        handles: list[Any] = []
        try:
            for path, part in self._modules.items():
                hook = self._hooks[path]
                if compiled_call_of_module(part) is not None:  # its hooks are part of the compiled function
                    handles.append(CompiledCallHook(part, functools.partial(hook, None, None)))
                else:
                    handles.append(part.register_forward_hook(hook))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def take(self) -> dict[str, OutputFigures]:
        """Return the figures since the last call of this method.

        In a compiled step it is called before and after the transformed function that runs the model, since its tensors
        must leave that function as a result.
        """
        found, self._found = self._found, {}
        return found

    def keep(self, found: Mapping[str, OutputFigures]) -> None:
        """Add what `take` returned inside of a transformed function, outside of it."""
        self._kept = {path: add_figures(self._kept.get(path), figures) for path, figures in found.items()}

    def _hook(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module | None, args: Any, output: Any) -> None:
            if self._traced:
                self._add(path, output)
            elif not torch.compiler.is_compiling() and not is_in_backward() and not has_active_transforms():
                with without_function_modes():
                    self._add(path, output)

        return hook

    def _add(self, path: str, output: Any) -> None:
        with torch.no_grad():
            for tensor in filter(_is_measured, output_tensors(output)):
                figures = _tensor_figures(tensor.detach(), self._limits, self._state.device)
                self._found[path] = add_figures(self._found.get(path), figures)

    @torch.no_grad()
    def totals(self) -> dict[str, OutputFigures]:
        """Return the figures of every selected module in the step, over all processes by one all-reduce."""
        found, self._kept = (self._kept if self._traced else self.take()), {}
        device, replicas = self._state.device, self._state.replicas
        nothing = OutputFigures(torch.zeros(_SUMS, dtype=torch.float64, device=device), torch.zeros((), device=device))
        figures = [found.get(path, nothing) for path in self._modules]
        sums = torch.stack([each.sums for each in figures])
        largest = torch.stack([each.largest for each in figures]).double()
        if replicas.group is not None:  # the maximum travels in a column of each process's own
            size, rank = torch.distributed.get_world_size(replicas.group), torch.distributed.get_rank(replicas.group)
            columns = torch.zeros(len(figures), size, dtype=torch.float64, device=device)
            columns[:, rank] = largest
            flat = replicas.all_reduce_vector(torch.cat([sums.reshape(-1), columns.reshape(-1)]))
            sums = flat[: sums.numel()].view_as(sums)
            largest = flat[sums.numel() :].view_as(columns).amax(1)
        return {path: OutputFigures(sums[row], largest[row]) for row, path in enumerate(self._modules)}


def with_output_figures(result: StepResult, outputs: OutputHooks | None) -> StepResult:
    """Return a step's result with the figures that were recorded in it; the result itself without a recorder."""
    if outputs is None or result.monitor is None:
        return result
    return result._replace(monitor=result.monitor._replace(activations=outputs.totals()))


def add_figures(one: OutputFigures | None, other: OutputFigures) -> OutputFigures:
    """Return the figures of two calls together."""
    if one is None:
        return other
    return OutputFigures(one.sums + other.sums, torch.maximum(one.largest, other.largest))


def _tensor_figures(tensor: torch.Tensor, limits: OutputLimits, home: torch.device) -> OutputFigures:
    """Return the figures of one tensor, float64; the largest value is inf if one is not finite."""
    values = local_tensor_of(tensor)
    values = torch.view_as_real(values) if values.is_complex() else values
    values = (values if values.dtype == torch.float64 else values.float()).abs()
    zeros = (values == 0.0).sum()
    lost = (values <= limits.zero).sum()
    below = (values < limits.normal).sum()
    within = (values < limits.overflow).sum()
    elements = torch.full_like(zeros, values.numel())
    squares = torch.linalg.vector_norm(values, dtype=torch.float64).square()
    sums = torch.stack([elements, zeros, lost - zeros, below - lost, elements - within]).double()
    largest = torch.nan_to_num(values.amax(), nan=torch.inf, posinf=torch.inf).double()
    return OutputFigures(torch.cat([sums, squares.reshape(1)]).to(home), largest.to(home))


def _is_measured(tensor: torch.Tensor) -> bool:
    floats = tensor.is_floating_point() or tensor.is_complex()
    return bool(floats and tensor.numel() and tensor.layout == torch.strided)
