"""Cast mode: cast copies stand in a module where its parameters were, and gradients flow to the masters (S3, S7).

`torch.func.functional_call` does the same for one call of the whole module. Here the copies stay for as long as they
are wanted: for parts of the model that `loss_fn` calls by themselves, and for what a checkpoint runs again in the
backward pass. Called by `bound`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from polyamp.errors import PolicyError, UnsupportedError
from polyamp.rules.plan import Plan
from polyamp_torch.arrays import DTYPES, dtype_name, is_castable
from polyamp_torch.compat import buffers_in, gathered_by_fsdp2, parameters_in, renew_list_of_weights, version_of

_BATCH_NORMS: Final = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""In cast mode these keep float32 parameters and statistics: torch's kernels take 16-bit inputs beside them."""


def dtype_in_module(plan: Plan, overrides: Mapping[str, str], path: str, part: nn.Module) -> str:
    """The dtype in which a module's own parameters stand in it while it computes: the masters' in mode "autocast", the
    cast's in mode "cast".

    Args:
        plan: the policy.
        overrides: path -> dtype, the paths as `part`'s is.
        path: of the module, `/`-separated.
        part: the module.
    """
    if not (plan.cast and plan.policy.is_mixed) or isinstance(part, _BATCH_NORMS):
        return plan.param
    return overrides.get(path, plan.compute)


class _Place(NamedTuple):
    """One tensor's place in a module.

    Attributes:
        slots: `_parameters` or `_buffers` of the module that owns it.
        name: its name there.
        path: its path in the model.
        master: the tensor itself.
        before: what stood there: the master, or a cast of it by a policy further out.
        copy: what stands there instead.
        versions: how often master and copy had been written to.
        shape: of the copy as it was made.
    """

    slots: dict[str, Any]
    name: str
    path: str
    master: torch.Tensor
    before: torch.Tensor
    copy: torch.Tensor
    versions: tuple[int, int]
    shape: torch.Size


class Casts:
    """A context in which a module's parameters and floating buffers are cast to the policy's dtypes.

    A tensor has one copy however many modules share it. A buffer that the forward pass changed in its cast form is
    written back to the float32 one, and so is a parameter by `commit`. A parameter that FSDP2 gathers is cast where it
    is gathered, by its unit's `MixedPrecisionPolicy`, and stays in its place. Where casts of a policy further out stand
    in the module, their masters are cast, or stand there themselves if this policy casts none.

    Raises:
        PolicyError: on entering, if overrides give a shared tensor two dtypes.
    """

    def __init__(self, module: nn.Module, overrides: dict[str, str], plan: Plan) -> None:
        self.module = module
        self.overrides = overrides
        self.plan = plan
        self.places: list[_Place] = []
        self.outer: Mapping[int, torch.Tensor] = {}
        self._looked: set[bool] = set()
        self._looked_at_buffers: set[bool] = set()
        self._silent: set[int] = set()

    def __enter__(self) -> None:
        # The copies serve every thread that comes, so the first one's no_grad() must not show in them.
        with torch.inference_mode(False), torch.enable_grad():
            self.places = self._copies()
        for place in self.places:
            place.slots[place.name] = place.copy

    def __exit__(self, *_: Any) -> None:
        looks = self.module.training not in self._looked_at_buffers
        self._looked_at_buffers.add(self.module.training)
        for place in self.places:
            if not isinstance(place.master, nn.Parameter) and (looks or id(place.master) in self._silent):
                self._look(place)
            _put_back(place, silent=id(place.master) in self._silent)
        self.places = []
        for part in self.module.modules():
            if isinstance(part, nn.RNNBase):  # it keeps a list of its weights
                renew_list_of_weights(part)

    @torch.no_grad()
    def _look(self, place: _Place) -> None:
        """See whether a buffer was written to through `.data`, which moves no version counter."""
        copy, master = place.copy, place.master
        if copy is master or copy.shape != master.shape or _version(copy) != place.versions[1]:
            return
        before = master.to(copy.dtype)
        if bool(((copy != before) & ~(copy.isnan() & before.isnan())).any()):
            self._silent.add(id(master))

    def refresh(self) -> None:
        """New copies, if a master was written to since the copies were made."""
        if any(_version(place.master) != place.versions[0] for place in self.places):
            self.__exit__()
            self.__enter__()

    @torch.no_grad()
    def commit(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Give the masters what a forward pass wrote to their casts: the elements that it changed; the others keep
        their digits (S12). Each that was written to, with its value before.

        Writes are known by the version counters, which those through `.data` do not move: so all casts are compared
        once in training and once in evaluation, and every time those that such a write was found in.

        Raises:
            UnsupportedError: a write that cannot be kept: a parameter that was replaced, or one whose master was
                written as well.
        """
        looks = self.module.training not in self._looked
        self._looked.add(self.module.training)
        found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for _, place in self._parameters():
            master, copy = place.master, place.copy
            written, by_hand = _version(copy) != place.versions[1], _version(master) != place.versions[0]
            if id(master) in found or not (written or looks or id(master) in self._silent):
                continue
            if by_hand and not written:
                continue
            if by_hand:
                raise UnsupportedError(
                    f"loss_fn wrote to the parameter {place.path!r} and to its cast in the model, of which mode='cast' "
                    "can keep one. Write to the model's own parameter alone, or use mode='autocast'."
                )
            changed = copy.detach() != master.detach().to(copy.dtype)
            if not written and id(master) not in self._silent:
                if not bool(changed.any()):
                    continue
                self._silent.add(id(master))
            found[id(master)] = (master, master.detach().clone())
            master.copy_(torch.where(changed, copy.detach().to(master.dtype), master))
        for number, place in self._parameters() if found else ():
            if id(place.master) in found:
                self.places[number] = place._replace(versions=(_version(place.master), _version(place.copy)))
        return list(found.values())

    @torch.no_grad()
    def discard(self) -> None:
        """Behind a pass that is to leave nothing: the casts of parameters as the masters have them. Buffers are taken
        back before by whoever keeps them."""
        for number, place in enumerate(self.places):
            if place.copy is not place.master and isinstance(place.master, nn.Parameter):
                place.slots[place.name] = place.copy
                place.copy.copy_(place.master)
            self.places[number] = place._replace(versions=(_version(place.master), _version(place.copy)))

    @torch.no_grad()
    def written(self) -> list[torch.Tensor]:
        """The masters to which `commit` will bring what a forward pass wrote to their casts.

        Raises:
            UnsupportedError: a parameter that was replaced.
        """
        looks = self.module.training not in self._looked
        found: dict[int, torch.Tensor] = {}
        for _, place in self._parameters():
            master, copy = place.master, place.copy
            by_hand = _version(master) != place.versions[0]  # what it casts to by now is not what was cast
            if _version(copy) != place.versions[1] or (
                not by_hand
                and (looks or id(master) in self._silent)
                and bool((copy.detach() != master.detach().to(copy.dtype)).any())
            ):
                found[id(master)] = master
        return list(found.values())

    def _parameters(self) -> Iterator[tuple[int, _Place]]:
        """The places of the parameters that are cast, with their numbers.

        Raises:
            UnsupportedError: something else stands in one.
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

    def _copies(self) -> list[_Place]:
        double = self.plan.float64
        copies: dict[int, torch.Tensor] = {}
        places = []
        gathered = {
            (id(owner), name) for each in gathered_by_fsdp2(self.module.modules()) for owner, name in each.places
        }
        for path, part in self.module.named_modules():
            dtype = DTYPES[self.overrides.get(path.replace(".", "/"), self.plan.compute)] if self.plan.cast else None
            if isinstance(part, _BATCH_NORMS):
                continue
            for slots in (parameters_in(part), buffers_in(part)):
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
                    whole, versions = f"{path}.{name}" if path else name, (_version(master), _version(copy))
                    places.append(_Place(slots, name, whole, master, before, copy, versions, copy.shape))
        return places


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else version_of(tensor)  # inference tensors do not count


def _put_back(place: _Place, *, silent: bool) -> None:
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
            elif silent or _version(copy) != version:
                master.copy_(copy)
