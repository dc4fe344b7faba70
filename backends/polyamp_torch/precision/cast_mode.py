"""Cast mode: cast copies replace a module's parameters, and gradients flow to the masters (S3, S7).

`torch.func.functional_call` does the same for one call of the whole module. Here the copies stay for longer: for
submodules that `loss_fn` calls directly, and for what a checkpoint recomputes in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from polyamp.errors import PolicyError, UnsupportedError
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp_torch.arrays import DTYPES, dtype_name, is_castable
from polyamp_torch.compat import (
    gathered_fsdp2_parameters,
    module_buffers,
    module_parameters,
    reset_flat_weights,
    tensor_version,
)

_BATCH_NORMS: Final = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""Modules that keep float32 parameters and statistics in cast mode: torch's kernels accept 16-bit inputs with them."""


def dtype_in_module(plan: ResolvedPolicy, overrides: Mapping[str, str], path: str, part: nn.Module) -> str:
    """Return the dtype of a module's own parameters while it computes: the masters' in mode "autocast", the cast's in
    mode "cast".

    Args:
        plan: the resolved policy.
        overrides: path -> dtype, with paths of the same form as `path`.
        path: path of the module, `/`-separated.
        part: the module.
    """
    if not (plan.cast and plan.policy.is_mixed) or isinstance(part, _BATCH_NORMS):
        return plan.param
    return overrides.get(path, plan.compute)


class _CastTensor(NamedTuple):
    """A tensor's entry in a module, and the cast that replaces it.

    Attributes:
        slots: `_parameters` or `_buffers` of the module that owns it.
        name: its key in `slots`.
        path: its path in the model.
        master: the tensor itself.
        before: the previous entry: the master, or its cast by an enclosing policy.
        copy: the entry while the casts are installed.
        versions: version counters of master and copy when the copy was made.
        shape: initial shape of the copy.
    """

    slots: dict[str, Any]
    name: str
    path: str
    master: torch.Tensor
    before: torch.Tensor
    copy: torch.Tensor
    versions: tuple[int, int]
    shape: torch.Size


class ParameterCasts:
    """Context manager that casts a module's parameters and floating buffers to the policy's dtypes.

    - A tensor has one copy however many modules share it.
    - Changes that the forward pass makes to a cast buffer are written back on exit; those to a parameter by `commit`.
    - A parameter that FSDP2 gathers stays: FSDP2 casts it on gathering, by its unit's `MixedPrecisionPolicy`.
    - Casts of an enclosing policy are replaced by casts of their masters, or by the masters if this policy casts none.

    Raises:
        PolicyError: on entering, if overrides give a shared tensor two dtypes.
    """

    def __init__(self, module: nn.Module, overrides: dict[str, str], plan: ResolvedPolicy) -> None:
        self.module = module
        self.overrides = overrides
        self.plan = plan
        self.places: list[_CastTensor] = []
        self.outer: Mapping[int, torch.Tensor] = {}
        self._compared_parameters: set[bool] = set()
        self._compared_buffers: set[bool] = set()
        self._data_writes: set[int] = set()

    def __enter__(self) -> None:
        # All threads share the copies, so the first thread's no_grad() must not affect them.
        with torch.inference_mode(False), torch.enable_grad():
            self.places = self._make_copies()
        for place in self.places:
            place.slots[place.name] = place.copy

    def __exit__(self, *_: Any) -> None:
        compares_all = self.module.training not in self._compared_buffers
        self._compared_buffers.add(self.module.training)
        for place in self.places:
            if not isinstance(place.master, nn.Parameter) and (compares_all or id(place.master) in self._data_writes):
                self._detect_data_write(place)
            _restore_tensor(place, has_data_write=id(place.master) in self._data_writes)
        self.places = []
        for part in self.module.modules():
            if isinstance(part, nn.RNNBase):  # it stores a list of its weights
                reset_flat_weights(part)

    @torch.no_grad()
    def _detect_data_write(self, place: _CastTensor) -> None:
        """Detect a buffer write through `.data`, which does not increase the version counter."""
        copy, master = place.copy, place.master
        if copy is master or copy.shape != master.shape or _write_count(copy) != place.versions[1]:
            return
        before = master.to(copy.dtype)
        if bool(((copy != before) & ~(copy.isnan() & before.isnan())).any()):
            self._data_writes.add(id(master))

    def refresh(self) -> None:
        """Make new copies if a master was written to since the copies were made."""
        if any(_write_count(place.master) != place.versions[0] for place in self.places):
            self.__exit__()
            self.__enter__()

    @torch.no_grad()
    def commit(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copy the elements that a forward pass changed in casts to the masters; the others keep their digits (S12).
        Return each master that was written to, with its previous value.

        Version counters detect writes, except those through `.data`. So all casts are compared once in training and
        once in evaluation. Casts with a detected `.data` write are compared every time.

        Raises:
            UnsupportedError: a parameter was replaced, or its master was written to as well.
        """
        written = list(self._written())
        self._compared_parameters.add(self.module.training)
        found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for place in written:
            master, copy = place.master, place.copy
            if id(master) in found:
                continue
            if _write_count(master) != place.versions[0]:
                raise UnsupportedError(
                    f"loss_fn wrote to the parameter {place.path!r} and to its cast in the model, of which mode='cast' "
                    "can keep one. Write to the model's own parameter alone, or use mode='autocast'."
                )
            if _write_count(copy) == place.versions[1]:
                self._data_writes.add(id(master))
            found[id(master)] = (master, master.detach().clone())
            changed = copy.detach() != master.detach().to(copy.dtype)
            master.copy_(torch.where(changed, copy.detach().to(master.dtype), master))
        for number, place in self._parameters() if found else ():
            if id(place.master) in found:
                self.places[number] = place._replace(versions=(_write_count(place.master), _write_count(place.copy)))
        return list(found.values())

    @torch.no_grad()
    def discard(self) -> None:
        """Reset the casts of parameters to the masters' values, dropping a pass's writes. The owner of the buffer
        snapshot restores buffers before."""
        for number, place in enumerate(self.places):
            if place.copy is not place.master and isinstance(place.master, nn.Parameter):
                place.slots[place.name] = place.copy
                place.copy.copy_(place.master)
            self.places[number] = place._replace(versions=(_write_count(place.master), _write_count(place.copy)))

    @torch.no_grad()
    def written(self) -> list[torch.Tensor]:
        """Return the masters that `commit` will write to.

        Raises:
            UnsupportedError: a parameter that was replaced.
        """
        return list({id(place.master): place.master for place in self._written()}.values())

    def _written(self) -> Iterator[_CastTensor]:
        """Yield the cast parameters that the pass wrote to, but not those of which only the master has changed."""
        compares_all = self.module.training not in self._compared_parameters
        for _, place in self._parameters():
            master, copy = place.master, place.copy
            if _write_count(copy) != place.versions[1] or (
                _write_count(master) == place.versions[0]
                and (compares_all or id(master) in self._data_writes)
                and bool((copy.detach() != master.detach().to(copy.dtype)).any())
            ):
                yield place

    def _parameters(self) -> Iterator[tuple[int, _CastTensor]]:
        """Yield index and entry of every cast parameter.

        Raises:
            UnsupportedError: a cast parameter was replaced.
        """
        for number, place in enumerate(self.places):
            if not isinstance(place.master, nn.Parameter):
                continue
            if place.slots.get(place.name) is not place.copy:
                raise UnsupportedError(
                    f"the forward pass replaced the parameter {place.path!r}, in whose place mode='cast' has a cast. "
                    "Write into it (parameter.copy_(value) under torch.no_grad()), or use mode='autocast'."
                )
            if place.copy is not place.master:
                yield number, place

    def _make_copies(self) -> list[_CastTensor]:
        double = self.plan.float64
        copies: dict[int, torch.Tensor] = {}
        places = []
        gathered = {
            (id(owner), name)
            for each in gathered_fsdp2_parameters(self.module.modules())
            for owner, name in each.places
        }
        for path, part in self.module.named_modules():
            dtype = DTYPES[self.overrides.get(path.replace(".", "/"), self.plan.compute)] if self.plan.cast else None
            if isinstance(part, _BATCH_NORMS):
                continue
            for slots in (module_parameters(part), module_buffers(part)):
                for name, before in slots.items():
                    if before is None or not is_castable(before, float64=double):
                        continue
                    if gathered and (id(part), name) in gathered:
                        continue
                    master = self.outer.get(id(before), before)
                    if dtype is None and master is before:
                        continue
                    copy = copies.setdefault(id(master), master if dtype is None else master.to(dtype))
                    if dtype is not None and copy.dtype != dtype:
                        raise PolicyError(
                            f"overrides give the tensor {path}.{name} the dtype {dtype_name(dtype)}, and "
                            f"{dtype_name(copy.dtype)} where else the model uses it. A shared tensor has one dtype in "
                            "mode='cast'."
                        )
                    whole, versions = f"{path}.{name}" if path else name, (_write_count(master), _write_count(copy))
                    places.append(_CastTensor(slots, name, whole, master, before, copy, versions, copy.shape))
        return places


def _write_count(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor_version(tensor)  # inference tensors have no version counter


def _restore_tensor(place: _CastTensor, *, has_data_write: bool) -> None:
    slots, name, _, master, before, copy, (_, version), shape = place
    now = slots.get(name, place)
    if isinstance(master, nn.Parameter):
        slots[name] = before
    elif now is None or now is place:  # set to None, or deleted
        return
    elif now is not copy:
        slots[name] = now.to(master.dtype) if now.is_floating_point() else now
    else:
        slots[name] = before
        if copy is master:
            return
        with torch.no_grad():
            if copy.shape != shape:
                master.data = copy.detach().to(master.dtype)
            elif has_data_write or _write_count(copy) != version:
                master.copy_(copy)
