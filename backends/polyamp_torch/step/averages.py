"""Moving averages of a state's parameters: their tensors, their move after an update, the model with them (S34).

The states are `TorchState`s, annotated as `Any` because `state` imports this module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from polyamp.array_namespace import PYTHON
from polyamp.errors import UnsupportedError
from polyamp.recipe.ema import Ema
from polyamp.rules.averages import average_share, averaged_paths
from polyamp_torch.arrays import DTYPES, XP, can_read_without_sync
from polyamp_torch.compat import foreach_lerp_
from polyamp_torch.step.torch_only.critical_section import DeferInterrupts
from polyamp_torch.step.torch_only.model_readers import model_reader
from polyamp_torch.step.torch_only.spec_formulas import slot_name
from polyamp_torch.step.torch_only.state_arrays import drop_gathered_parameters, state_buffers


class MovingAverages:
    """Averages of a state's parameters, and of its running statistics with `Ema(statistics="average")`.

    Attributes:
        model: path -> average of a parameter, on its device and sharded as it is.
        running: path -> average of a floating buffer.
        in_place: whether the model has the averages at the moment, inside of `averaged`.
    """

    def __init__(self, state: Any, ema: Ema) -> None:
        self._ema = ema
        self._dtype = DTYPES["float64" if state.recipe.policy.param == "float64" else "float32"]
        paths = averaged_paths(state.recipe, state.parameters, backend="torch")
        self.model = {path: self._wide(state.parameters[path]) for path in paths}
        buffers = state_buffers(state) if ema.statistics == "average" else {}
        self.running = {path: self._wide(b) for path, b in buffers.items() if b.is_floating_point()}
        self.in_place = False

    def named(self) -> dict[str, torch.Tensor]:
        """Return the averages by their names in a checkpoint, after `average/`."""
        return {
            f"{role}/{path}": average
            for role, own in (("model", self.model), ("running", self.running))
            for path, average in own.items()
        }

    @torch.no_grad()
    def move(self, state: Any, applied: torch.Tensor | None) -> None:
        """Move the averages after an update. Off the CPU nothing is read on the host.

        Args:
            state: the state after the update.
            applied: whether it was applied, boolean scalar; None if it was.
        """
        share: Any
        if can_read_without_sync(state.device):
            if applied is not None and not bool(applied):
                return
            share = average_share(self._ema, float(int(state.step)), None, PYTHON)
            if share == 0.0:
                return
        else:
            applied = None if applied is None else applied.to(state.device)
            share = average_share(self._ema, state.step.to(self._dtype), applied, XP)
        averages, values = self._pairs(state)
        values = [v if v.dtype == old.dtype else v.to(old.dtype) for old, v in zip(averages, values, strict=True)]
        if not isinstance(share, float):
            share = [share.to(average.device) for average in averages]
        foreach_lerp_(averages, values, share)

    def carry(self, before: MovingAverages, survivors: Mapping[str, str]) -> None:
        """Copy the averages of surviving parameters from the state that was refreshed (S28)."""
        for now, was in survivors.items():
            if now in self.model and was in before.model:
                self.model[now].copy_(before.model[was])

    @torch.no_grad()
    def write_to_model(self, state: Any) -> list[torch.Tensor]:
        """Write the averages to the model; return copies of what was there, for `write_back`."""
        drop_gathered_parameters(state)
        averages, places = self._pairs(state)
        kept = [place.clone() for place in places]
        for place, average in zip(places, averages, strict=True):
            place.copy_(average)
        return kept

    @torch.no_grad()
    def write_back(self, state: Any, kept: list[torch.Tensor]) -> None:
        """Undo `write_to_model`."""
        drop_gathered_parameters(state)
        for place, value in zip(self._pairs(state)[1], kept, strict=True):
            place.copy_(value)

    def _pairs(self, state: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the averages, and what they are of, as local real tensors."""
        buffers = state_buffers(state) if self.running else {}
        averages = [*self.model.values(), *self.running.values()]
        values = [*(state.parameters[path].detach() for path in self.model), *(buffers[path] for path in self.running)]
        return state.plain(averages), state.plain(values)

    def _wide(self, tensor: torch.Tensor) -> torch.Tensor:
        found = tensor.detach()
        return found.clone() if found.is_complex() else found.to(self._dtype, copy=True)


class OptimizerAverages(MovingAverages):
    """Averages of an optimizer that has its own, as they are at the moment."""

    @torch.no_grad()
    def __init__(self, state: Any) -> None:
        self.model, self.running, self.in_place = {}, {}, False
        for path, p in state.parameters.items():
            spec, slots = state.groups.of(path).spec, state.optimizer.state[p]
            self.model[path] = spec.average(p.detach(), {slot: slots[slot_name(slot)] for slot in spec.slots})


def _averages_of(state: Any) -> MovingAverages:
    return OptimizerAverages(state) if state.averages is None else state.averages


@contextlib.contextmanager
def averaged(state: Any) -> Iterator[nn.Module]:
    """Context manager that yields the model with its averages in place of the trained parameters.

    Raises:
        StateError: the state was refreshed, or is in such a block already.
    """
    with DeferInterrupts(), state.lock:  # Ctrl-C leaves all of the model's values of one kind
        state.check_alive()
        before, averages = state.averages, _averages_of(state)
        kept = averages.write_to_model(state)
        state.averages, averages.in_place = averages, True
        members = state.refuse_steps()
    torch.clear_autocast_cache()
    try:
        yield state.model
    finally:
        with DeferInterrupts(), state.lock:
            averages.write_back(state, kept)
            state.averages, averages.in_place = before, False
            state.allow_steps(members)
        torch.clear_autocast_cache()


@torch.no_grad()
def averaged_model(state: Any) -> nn.Module:
    """Return a copy of the model with the averages; of a DistributedDataParallel, of the module in it.

    Raises:
        UnsupportedError: the model is sharded, or cannot be copied.
        StateError: the state was refreshed, or is in `averaged`.
    """
    with state.lock:
        state.check_alive()
        averages = _averages_of(state)
        engine = state.replicas.engine.name
        if engine not in (None, "ddp"):
            raise UnsupportedError(
                f"averaged_model copies a model that one process holds whole. Received: a model under {engine}. Use "
                "`with polyamp.averaged(state) as model:`, which needs no copy."
            )
        model: Any = state.model if engine is None else state.model.module
        try:
            reader = model_reader(model)
            copied = reader.copied()
            twins = model_reader(copied).tensors()
        except Exception as error:
            raise UnsupportedError(
                f"averaged_model cannot copy this {type(model).__name__} ({type(error).__name__}: {error}). Use `with "
                "polyamp.averaged(state) as model:`, which needs no copy."
            ) from error
        buffers = state_buffers(state)
        found = {id(state.parameters[path]): average for path, average in averages.model.items()}
        found |= {id(buffers[path]): average for path, average in averages.running.items()}
        for place, twin in zip(reader.tensors(), twins, strict=True):
            if id(place) in found:
                twin.copy_(found[id(place)])
        return copied
