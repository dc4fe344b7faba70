"""`TorchSlots`: what a step collects for a monitor, in torch (S35). Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from polyamp.monitor.slots import EXPONENT_FIELDS, MonitorSelection, MonitorSlots, collect_slots

if TYPE_CHECKING:
    from polyamp_torch.step.state import TorchState


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
        """Return the figures, after the update."""
        assert self._slots is not None
        if not self._selection.updates:
            return self._slots
        now = {name: p.detach() for name, p in state.parameters.items()}
        only = self._selection._replace(gradients=False, weights=False)
        rest = collect_slots(only, self._functions, {}, self._old, now, read=None, scale=None, carried=None)
        return self._slots._replace(weight_norms=rest.weight_norms, update_norms=rest.update_norms)


class TorchSlots:
    """`SlotFunctions` for torch. Shards are counted where they are, and added up in one all-reduce.

    Args:
        state: whose parameters the arrays belong to.
    """

    def __init__(self, state: TorchState) -> None:
        self._state = state
        self._parts = state.replicas.parts_by_name(state.parameters)

    def exponent_counts(self, name: str, array: torch.Tensor) -> torch.Tensor:
        """Return how many elements have each exponent field; float64 while parts of several processes are counted."""
        values = self._local(array).float().reshape(-1)
        fields = (values.view(torch.int32) >> 23) & 255
        if values.device.type == "cpu":
            counts = torch.bincount(fields, minlength=EXPONENT_FIELDS)
        else:  # bincount would make the host wait
            counts = torch.zeros(EXPONENT_FIELDS, dtype=torch.int64, device=values.device)
            counts.scatter_add_(0, fields.long(), torch.ones_like(fields, dtype=torch.int64))
        return (counts * self._parts[name] if name in self._parts else counts).to(self._state.device)

    def squares(self, name: str, array: torch.Tensor) -> torch.Tensor:
        """Return the sum of squares, float64 scalar."""
        found: torch.Tensor = torch.linalg.vector_norm(self._local(array).reshape(-1), dtype=torch.float64).square()
        return (found * self._parts[name] if name in self._parts else found).to(self._state.device)

    def stack(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Stack tensors, as float64, in which counts are exact."""
        return torch.stack([value.double() for value in values])

    def square_root(self, values: torch.Tensor) -> torch.Tensor:
        """Return the square root, float32."""
        return values.sqrt().float()

    def reduce(
        self, counts: Sequence[torch.Tensor], squares: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return counts and squares over all processes, by one all-reduce if these hold different parts."""
        every = [*counts, *squares]
        if self._parts and every:
            flat = self._state.replicas.all_reduce_vector(torch.cat([each.reshape(-1) for each in every]))
            parts = torch.split(flat, [each.numel() for each in every])
            every = [part.view_as(each) for part, each in zip(parts, every, strict=True)]
        whole = [each.round().to(torch.int32) for each in every[: len(counts)]]
        return whole, every[len(counts) :]

    def _local(self, array: torch.Tensor) -> torch.Tensor:
        """Return the local part of a tensor, complex numbers as pairs of real ones."""
        (local,) = self._state.plain([array])
        return torch.view_as_real(local) if local.is_complex() else local
