"""`TorchSlots`: what a step collects for a monitor, in torch (S35). Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch

from polyamp.monitor.slots import EXPONENT_FIELDS, MonitorSelection, MonitorSlots, add_update_norms, collect_slots

if TYPE_CHECKING:
    from polyamp_torch.step.state import TorchState


_SUMS: Final = ("gradients", "gradient_norms", "weights", "weight_norms", "update_norms")
"""Fields of the slots that are sums over elements, norms as squares."""


class MonitoredUpdate:
    """Collects the figures of one update of a state: made before it, `measure` and then `finish` called.

    Args:
        state: the state.
        selection: what is collected.
    """

    @torch.no_grad()
    def __init__(self, state: TorchState, selection: MonitorSelection) -> None:
        self._selection = selection
        self._functions = TorchSlots(state)
        self._scale = state.scale_state.scale.clone()
        self._old = {
            name: p.detach().clone() if selection.updates or selection.weights else p.detach()
            for name, p in state.parameters.items()
        }
        self._slots: MonitorSlots | None = None

    @torch.no_grad()
    def measure(self, gradients: Mapping[str, torch.Tensor], carried: torch.Tensor | None) -> None:
        """Measure gradients by path, before clipping; `carried` is the factor that they contain, None for 1."""
        home = self._scale.device
        self._slots = collect_slots(
            self._selection._replace(updates=False),
            self._functions,
            gradients,
            self._old,
            {},
            read=torch.ones((), dtype=torch.bool, device=home),
            scale=self._scale,
            carried=torch.ones((), device=home) if carried is None else carried.to(home, torch.float32, copy=True),
        )

    @torch.no_grad()
    def finish(self, state: TorchState) -> MonitorSlots:
        """Return the figures, after the update; over all processes by one all-reduce, if these hold different parts."""
        assert self._slots is not None
        found = self._slots
        if self._selection.updates:
            now = {name: p.detach() for name, p in state.parameters.items()}
            found = add_update_norms(found, self._selection, self._functions, self._old, now)
        sums = {name: getattr(found, name) for name in _SUMS if getattr(found, name) is not None}
        if self._functions.parts and sums:
            flat = torch.cat([each.reshape(-1) for each in sums.values()])
            parts = torch.split(state.replicas.all_reduce_vector(flat), [each.numel() for each in sums.values()])
            sums = {name: part.view_as(sums[name]) for name, part in zip(sums, parts, strict=True)}
        whole = {
            name: each.sqrt().float() if name.endswith("norms") else each.round().to(torch.int32)
            for name, each in sums.items()
        }
        return found._replace(**whole)


class TorchSlots:
    """`SlotFunctions` for torch; shards are counted where they are.

    Args:
        state: whose parameters the arrays belong to.

    Attributes:
        parts: path -> what part of its local elements this process counts; empty if it has all of them.
    """

    def __init__(self, state: TorchState) -> None:
        self._state = state
        self.parts = state.replicas.parts_by_name(state.parameters)

    def exponent_counts(self, name: str, array: torch.Tensor) -> torch.Tensor:
        """Return how many elements have each exponent field; float64 while parts of several processes are counted."""
        values = self._local(array).float().reshape(-1)
        fields = (values.view(torch.int32) >> 23) & 255
        if values.device.type == "cpu":
            counts = torch.bincount(fields, minlength=EXPONENT_FIELDS)
        else:  # bincount would make the host wait
            counts = torch.zeros(EXPONENT_FIELDS, dtype=torch.int64, device=values.device)
            counts.scatter_add_(0, fields.long(), torch.ones_like(fields, dtype=torch.int64))
        return (counts * self.parts[name] if name in self.parts else counts).to(self._state.device)

    def squares(self, name: str, array: torch.Tensor) -> torch.Tensor:
        """Return the sum of squares, float64 scalar."""
        found: torch.Tensor = torch.linalg.vector_norm(self._local(array).reshape(-1), dtype=torch.float64).square()
        return (found * self.parts[name] if name in self.parts else found).to(self._state.device)

    def stack(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Stack tensors, as float64, in which counts are exact."""
        return torch.stack([value.double() for value in values])

    def square_root(self, values: torch.Tensor) -> torch.Tensor:
        """Return the squares themselves: their sum over the processes comes first."""
        return values

    def _local(self, array: torch.Tensor) -> torch.Tensor:
        """Return the local part of a tensor, complex numbers as pairs of real ones."""
        (local,) = self._state.plain([array])
        return torch.view_as_real(local) if local.is_complex() else local
