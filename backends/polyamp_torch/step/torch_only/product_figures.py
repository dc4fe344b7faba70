"""`PassWatch`: figures of the passes of a step for a monitor: of modules' outputs, and of products in 8 bits (S35).

Nothing here waits for the device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Final

import torch

from polyamp.monitor.slots import MonitorSelection
from polyamp.results import StepResult
from polyamp_torch.precision.torch_only.float8_watch import FigureSink
from polyamp_torch.step.output_figures import OutputHooks, with_output_figures
from polyamp_torch.step.state import TorchState

_SHAPE: Final = (3, 4)
"""Shape of the figures of a module's products."""


class PassWatch:
    """Records what a monitor selected of the passes of a step, while it is `installed`.

    Args:
        state: the state.
        selection: of the monitor.

    Raises:
        ArgumentError: the selection matches no module.
    """

    def __init__(self, state: TorchState, selection: MonitorSelection) -> None:
        self._outputs = OutputHooks(state, selection) if selection.activations else None
        self._products = ProductRecorder(state) if selection.products else None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Context manager for the forward and backward passes that count."""
        with contextlib.ExitStack() as blocks:
            if self._outputs is not None:
                blocks.enter_context(self._outputs.installed())
            if self._products is not None:
                blocks.enter_context(self._products.installed())
            yield

    def with_figures(self, result: StepResult) -> StepResult:
        """Return a step's result with the figures, over all processes."""
        result = with_output_figures(result, self._outputs)
        if self._products is None or result.monitor is None:
            return result
        return result._replace(monitor=result.monitor._replace(products=self._products.totals()))


class ProductRecorder:
    """Adds up the figures of the products in 8 bits with a model's parameters, by module.

    What `torch.compile` made runs uncompiled meanwhile: its products are not seen otherwise.

    Args:
        state: the state, whose model's products are recorded.
    """

    def __init__(self, state: TorchState) -> None:
        self._state = state
        self._owners = state.reader.parameter_modules()
        self._modules = list(dict.fromkeys(self._owners.values()))
        self._found: dict[str, torch.Tensor] = {}

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Context manager in which products are recorded."""
        with self._state.reader.watch_products(self):
            yield

    def sink(self, parameter: torch.Tensor) -> FigureSink | None:
        """Return where the figures of products with a parameter go; None if it is not the model's."""
        if id(parameter) not in self._owners:  # fully_shard gathers a parameter as another tensor
            self._owners = self._state.reader.parameter_modules()
        path = self._owners.get(id(parameter))
        return None if path is None else functools.partial(self.add, path)

    def add(self, path: str, figures: torch.Tensor) -> None:
        """Add the figures of a product of a module."""
        figures = figures.to(self._state.device)
        known = self._found.get(path)
        self._found[path] = figures if known is None else known + figures

    @torch.no_grad()
    def totals(self) -> dict[str, torch.Tensor]:
        """Return path -> figures of every module that has parameters, over all processes by one all-reduce; zeros of a
        module without products."""
        if not self._modules:
            return {}
        nothing = torch.zeros(_SHAPE, dtype=torch.float64, device=self._state.device)
        sums = torch.stack([self._found.get(path, nothing) for path in self._modules])
        if self._state.replicas.group is not None:
            sums = self._state.replicas.all_reduce_vector(sums.reshape(-1)).view_as(sums)
        return dict(zip(self._modules, sums, strict=True))
