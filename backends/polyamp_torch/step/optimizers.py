"""`torch.optim` optimizers from specs, and one step of any torch optimizer under a finite flag.

- SGD, Adam and AdamW use torch's fused kernels, which accept the flag and the divisor.
- All others run polyamp's own formulas over multi-tensor kernels, and select by the flag on the device.

Neither synchronises with the host. The host reads the flag once a step for native optimizers without fused kernels or
without their state yet, and for parameters that the fused kernels do not support.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from polyamp.errors import UnsupportedError
from polyamp.recipe.optimizers import SPECS, is_spec
from polyamp.rules.group_members import GroupHyperparameters, GroupMembers
from polyamp_torch.arrays import HALF_TENSOR_DTYPES, can_read_without_sync
from polyamp_torch.compat import has_found_inf_support, local_tensor_of
from polyamp_torch.step.torch_only.learning_rates import GroupLearningRates
from polyamp_torch.step.torch_only.optimizer_kernels import FusedKernels, make_step_counts
from polyamp_torch.step.torch_only.spec_formulas import (
    FormulaOptimizer,
    initialize_parameter,
    native_class,
    run_formula,
    torch_native,
)

ParameterList = list[torch.nn.Parameter]
_FORMULA_SPECS: Final = tuple(
    spec for spec in SPECS if not any(native.is_fused for native in spec.native.get("torch", ()))
)


def build_optimizer(groups: GroupMembers, named: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the torch optimizer for a spec, with its state arrays; a native one is checked and returned.

    Args:
        groups: the recipe's optimizer, resolved against the parameters; a parameter group for each set of
            hyperparameters.
        named: path -> parameter.

    Raises:
        UnsupportedError: a native object is not an optimizer over exactly these parameters.
    """
    optimizer, parameters = groups.distinct[0].spec, list(named.values())
    if is_spec(optimizer):
        return _build_from_spec(groups, named)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedError(
            "optimizer must be one of polyamp's specs or a torch.optim.Optimizer over the model's parameters. "
            f"Received: {type(optimizer).__module__}.{type(optimizer).__qualname__}."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            "LBFGS evaluates the loss several times a step through a closure, which one finite flag and one scale "
            "cannot cover. Use another optimizer, or a float32 loop of your own."
        )
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if sorted(held) != sorted(map(id, parameters)):
        raise UnsupportedError(
            "optimizer must hold exactly the model's trainable parameters, each once. Build it from "
            "[p for p in model.parameters() if p.requires_grad]."
        )
    for group in optimizer.param_groups:
        if group.get("fused"):
            _refuse_fused(optimizer, group)
    return optimizer


def _refuse_fused(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Raise for parameters that torch's fused kernels train incorrectly."""
    gaps = [p for p in group["params"] if not _is_dense(p)]
    if gaps:
        raise UnsupportedError(
            "torch's fused optimizers write beside parameters that have gaps in memory, such as slices. Received: "
            f"fused=True with a parameter of shape {tuple(gaps[0].shape)} and strides {gaps[0].stride()}. "
            "Use fused=False, or make the parameter contiguous."
        )
    narrow = [p for p in group["params"] if p.device.type == "cpu" and p.dtype in HALF_TENSOR_DTYPES]
    if isinstance(optimizer, torch.optim.SGD) and narrow:
        raise UnsupportedError(
            "torch's fused SGD leaves whole blocks of 16-bit parameters as they were on the CPU "
            f"(github.com/pytorch/pytorch/issues/191763). Received: fused=True with {narrow[0].dtype}. Use fused=False."
        )


def _is_dense(p: torch.Tensor) -> bool:
    """Return whether a tensor has no gaps in memory, in any dimension order; only then torch preserves its strides."""
    p = local_tensor_of(p)
    return p.numel() < 2 or torch.empty_like(p, device="meta").stride() == p.stride()


def _build_from_spec(groups: GroupMembers, named: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    spec, held = groups.distinct[0].spec, _parameters_by_group(groups, named)
    parameters = [p for part in held for p in part]
    wide = (torch.float32, torch.float64, torch.complex64, torch.complex128)
    fused = all((p.dtype in wide or p.device.type == "cuda") and _is_dense(p) for p in parameters)  # see _refuse_fused
    first = _group_options(groups.distinct[0])
    parts: Any = parameters
    if not groups.is_uniform:
        parts = [{"params": part, **_group_options(m)} for part, m in zip(held, groups.distinct, strict=True)]
    native = torch_native(type(spec))
    made: torch.optim.Optimizer
    if native is None:
        made = FormulaOptimizer(parts, type(spec), **first)
    else:
        kind = native_class(native)
        made = kind(parts, **first, fused=fused) if native.is_fused else kind(parts, **first)
    _initialize_slots(made, groups, held, fused)
    return made


def _parameters_by_group(groups: GroupMembers, named: Mapping[str, torch.nn.Parameter]) -> list[ParameterList]:
    """Return the parameters of each set of hyperparameters."""
    held: list[ParameterList] = [[] for _ in groups.distinct]
    for path, p in named.items():
        held[groups.numbers[path]].append(p)
    return held


def _group_options(member: GroupHyperparameters) -> dict[str, Any]:
    """Return a parameter group's options; torch's names are polyamp's, except for the learning rate."""
    rate = member.learning_rate
    options = {name: getattr(member.spec, name) for name in member.spec.hyperparameters}
    return {"lr": float(rate(0)) if callable(rate) else rate, **options}


def _initialize_slots(
    optimizer: torch.optim.Optimizer, groups: GroupMembers, held: list[ParameterList], fused: bool
) -> None:
    """Create the state arrays now, so that a checkpoint always contains them.

    It also avoids fused SGD's uninitialised momentum after a skipped first step."""
    parameters = [p for part in held for p in part]
    spec = groups.distinct[0].spec
    together = fused and len({p.device for p in parameters}) == 1
    laid = iter(make_step_counts(len(parameters), parameters[0].device) if together else ())
    for part, member in zip(held, groups.distinct, strict=True):
        for p in part:
            count = None if not together else next(laid)
            initialize_parameter(optimizer, member.spec, p, p.device if fused or has_formula(spec) else "cpu", count)


def has_formula(spec: Any) -> bool:
    """Return whether a spec uses polyamp's formula, because torch's kernels for it accept no flag."""
    return isinstance(spec, _FORMULA_SPECS)


def separate_step_counts(optimizer: torch.optim.Optimizer) -> None:
    """Give every step count separate memory, as a compiler requires for tensors that it writes to."""
    for slots in optimizer.state.values():
        if isinstance(slots.get("step"), torch.Tensor):
            slots["step"] = slots["step"].clone()


def has_float64_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the parameters are float64, so that scalars applied to them are float64 too (S1)."""
    wide = (torch.float64, torch.complex128)
    return any(p.dtype in wide for group in optimizer.param_groups for p in group["params"][:1])


def has_grad_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's kernels divide the gradients by `grad_scale`: fused ones, in float32."""
    for group in optimizer.param_groups:
        if group["params"] and group["params"][0].dtype not in (torch.float32, torch.complex64):
            return False
    return _is_fused(optimizer)


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    for group in optimizer.param_groups:
        if not group.get("fused") or group.get("foreach"):
            return False
    return has_found_inf_support(optimizer)


def _has_found_inf(optimizer: torch.optim.Optimizer, spec: Any) -> bool:
    """Return whether the optimizer's kernels accept the flag: they are fused, and every state array exists."""
    if not _is_fused(optimizer):
        return False
    if is_spec(spec) or is_stateless(optimizer):
        return True
    held = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    return all(optimizer.state.get(p) for p in held)


def apply_optimizer(
    optimizer: torch.optim.Optimizer,
    spec: Any,
    applied: torch.Tensor,
    finite: torch.Tensor | None,
    by: torch.Tensor | None = None,
    grads: list[torch.Tensor] | None = None,
    kernels: FusedKernels | None = None,
    rates: GroupLearningRates | None = None,
    groups: GroupMembers | None = None,
    trains: Sequence[torch.Tensor | None] | None = None,
) -> None:
    """Step the optimizer over the parameters' `.grad` if `finite`, at the rate of the applied-update count (S13).

    Args:
        optimizer: the result of `build_optimizer`.
        spec: the recipe's optimizer, a spec or native.
        applied: number of updates so far; its device decides where the flag may be read.
        finite: the flag, or None if it is not checked.
        by: a float32 scalar by which the kernels divide the gradients, writing the quotients back; only for an
            optimizer that `has_grad_scale`.
        grads: the gradients as a list, for `kernels`.
        kernels: the result of `fused_kernels`.
        rates: the result of `group_learning_rates`.
        groups: the sets of hyperparameters, if a spec has parameter groups.
        trains: for each parameter group whether it takes the update, boolean scalar on the device or None for True;
            None alone for all groups (S27).
    """
    if finite is not None and can_read_without_sync(applied.device):
        if not bool(finite):
            return
        finite = None
    if kernels is None and has_formula(spec):
        if rates is not None:
            rates.set(applied)
        here = can_read_without_sync(applied.device)
        count = int(applied) + 1 if here else (applied.double() if has_float64_parameters(optimizer) else applied) + 1.0
        for number, group in enumerate(optimizer.param_groups):
            own = spec if groups is None else group_spec(groups, number)
            flag = None if trains is None else trains[number]
            taken = finite if flag is None else flag if finite is None else finite & flag
            run_formula(optimizer, group, current_spec(own, group), group["lr"], count, taken)
        return
    if finite is not None and not _has_found_inf(optimizer, spec):
        if not bool(finite):  # the only synchronisation: this optimizer has no flag on the device
            return
        finite = None
    if rates is not None:
        rates.set(applied)
    found_inf = None if finite is None else (~finite).float()
    waits = None if trains is None else [None if flag is None else (~flag).float() for flag in trains]
    if kernels is None or grads is None or not kernels.run(grads, found_inf, by, waits):
        if trains is not None:
            _drop_waiting(optimizer, trains)
        _step_native(optimizer, found_inf, by)


def fused_kernels(
    optimizer: torch.optim.Optimizer, spec: Any, parameters: Sequence[torch.nn.Parameter]
) -> FusedKernels | None:
    """Return the optimizer's fused kernels, which run without `optimizer.step()`; None if it is native or not fused.

    Their gradients must be in the order of `parameters`."""
    return FusedKernels(optimizer, parameters) if is_spec(spec) and _is_fused(optimizer) else None


def group_learning_rates(optimizer: torch.optim.Optimizer, groups: GroupMembers) -> GroupLearningRates | None:
    """Return the scheduled learning rates of the groups; None without a polyamp schedule."""
    if not is_spec(groups.distinct[0].spec):
        return None
    schedules = [member.spec.learning_rate for member in groups.distinct]
    scheduled = [rate if callable(rate) else None for rate in schedules]
    if not any(scheduled):
        return None
    return GroupLearningRates(
        optimizer, scheduled, [member.scale for member in groups.distinct], float64=has_float64_parameters(optimizer)
    )


def group_spec(groups: GroupMembers, number: int) -> Any:
    """Return the spec of a parameter group; all groups share one unless the recipe has groups."""
    return groups.distinct[number if not groups.is_uniform else 0].spec


def _drop_waiting(optimizer: torch.optim.Optimizer, trains: Sequence[torch.Tensor | None]) -> None:
    """Take the gradients from groups that do not train yet: `step()` has one flag for all groups. Reads on the host."""
    for group, flag in zip(optimizer.param_groups, trains, strict=True):
        if flag is not None and not bool(flag):
            for p in group["params"]:
                p.grad = None


def _step_native(optimizer: Any, found_inf: torch.Tensor | None, by: torch.Tensor | None) -> None:
    """Call `optimizer.step()`, with the flag and the divisor passed to its kernels."""
    if found_inf is None and by is None:
        optimizer.step()
        return
    optimizer.found_inf = found_inf
    optimizer.grad_scale = by
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf, optimizer.grad_scale


class GroupOptions(NamedTuple):
    """Options of a spec, with which those in the optimizer's groups must agree.

    Attributes:
        spec: the spec.
        uses_formula: see `has_formula`.
        amsgrad: whether it keeps the largest second moment.
        decouples: whether its weight decay is decoupled.
    """

    spec: Any
    uses_formula: bool
    amsgrad: bool
    decouples: bool


def group_options(spec: Any) -> GroupOptions | None:
    """Return the options of a spec, for `check_group_options`; None for a native optimizer."""
    if not is_spec(spec):
        return None
    return GroupOptions(spec, has_formula(spec), getattr(spec, "amsgrad", False), spec.decouples_decay)


def check_group_options(optimizer: torch.optim.Optimizer, options: GroupOptions, groups: GroupMembers) -> None:
    """Raise for options that the user wrote into a spec's groups and that would have no effect.

    Raises:
        UnsupportedError: the spec has no such option; the message names it.
        RecipeError: an option has an invalid value.
    """
    spec, uses_formula, amsgrad, decouples = options
    for number, group in enumerate(optimizer.param_groups):
        if uses_formula:
            current_spec(group_spec(groups, number), group)
        for name, differs in (
            ("amsgrad", bool(group.get("amsgrad")) != amsgrad),
            ("decoupled_weight_decay", group.get("decoupled_weight_decay", decouples) != decouples),
        ):
            if differs and (name == "amsgrad" or name not in spec.hyperparameters):
                raise UnsupportedError(
                    f"{name}={group[name]} was written into the optimizer's param_groups; {type(spec).__name__} has no "
                    f"such option. Give the recipe torch.optim.{type(spec).__name__}(..., {name}={group[name]})."
                )


def current_spec(spec: Any, group: dict[str, Any]) -> Any:
    """Return the spec with the options that the user wrote into the group.

    Raises:
        UnsupportedError: the options need other state arrays, or `maximize`, which the formulas do not have.
        RecipeError: an option has an invalid value.
    """
    options = {name: group.get(name, getattr(spec, name)) for name in spec.hyperparameters}
    if group.get("maximize"):
        raise UnsupportedError(f"maximize=True: {type(spec).__name__} minimises. Return the negative loss instead.")
    if group.get("dampening"):
        raise UnsupportedError(
            f"dampening={group['dampening']}: the formula of {type(spec).__name__} has none. Use compile=False."
        )
    if all(value == getattr(spec, name) for name, value in options.items()):
        return spec
    changed = type(spec)(spec.learning_rate, **options)
    if changed.slots != spec.slots:
        raise UnsupportedError(
            f"the optimizer's state arrays are {', '.join(spec.slots)}; the options in its param_groups now ask for "
            f"{', '.join(changed.slots)}. Call polyamp.init with such a recipe."
        )
    return changed


def is_stateless(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer is plain SGD, which has no state."""
    return isinstance(optimizer, torch.optim.SGD) and not any(group["momentum"] for group in optimizer.param_groups)
