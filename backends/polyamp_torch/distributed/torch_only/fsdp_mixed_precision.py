"""FSDP2's `MixedPrecisionPolicy` from a `Policy`: the dtypes in which parameters are gathered and gradients reduced.

    mode "autocast"   masters are gathered in their own dtype, and each operation casts as in one process
    mode "cast"       masters are gathered as their casts, which FSDP2 makes before it sends them
    in both           gradients are reduced in float32, or in the masters' dtype if that is wider

In mode "autocast", 16-bit gathered weights would give other results than one process: normalisations and embeddings
would use rounded weights too. `fully_shard` and `mixed_precision_policy` are the public functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import nn

from polyamp.errors import ArgumentError, ModelError, PolicyError, UnsupportedError
from polyamp.float_formats import HALF_DTYPES
from polyamp.recipe import overrides, path_aliases
from polyamp.recipe.policy import Policy
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp_torch.arrays import DTYPES, dtype_name
from polyamp_torch.compat import (
    WRAPPER_CLASSES,
    GatheredParameter,
    fsdp2_state,
    gathered_fsdp2_parameters,
)
from polyamp_torch.precision.cast_mode import dtype_in_module
from polyamp_torch.precision.policy_module import resolve_policy
from polyamp_torch.precision.torch_only.named_parameters import tree_parameters
from polyamp_torch.precision.torch_only.unwrapped_paths import unwrapped_paths

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

_CONTAINER_CLASSES: Final = (nn.ModuleList, nn.ModuleDict)
ModuleSelection = str | type[nn.Module] | Sequence[str | type[nn.Module]]


def mixed_precision_policy(policy: Policy | str) -> MixedPrecisionPolicy:
    """Return the `MixedPrecisionPolicy` for the units that `torch.distributed.fsdp.fully_shard` makes.

    In mode "autocast" (torch's default mode) parameters are gathered as they are stored, so that results equal those
    of one process, bit for bit. In mode "cast" they are gathered in the policy's `compute` dtype. Both modes reduce
    gradients in float32. In float16 a scaled gradient of 70,000 becomes infinite, 50,000 becomes 49,984, and values
    smaller than 6e-8 are lost.

    Modules that `overrides` keep in another dtype, and batch normalisation in mode "cast", need separate units:
    `polyamp_torch.fully_shard` makes them.

    Args:
        policy: a policy or its spelling.

    Raises:
        PolicyError: not a policy.

    Example:
        >>> import polyamp
        >>> mixed_precision_policy("mixed_float16").reduce_dtype
        torch.float32
        >>> mixed_precision_policy(polyamp.Policy("mixed_float16", mode="cast")).param_dtype
        torch.float16
    """
    return _unit_policy(ResolvedPolicy(Policy.of(policy), {}), None, casts_inputs=True)


def fully_shard(
    model: nn.Module,
    policy: Policy | str,
    *,
    mesh: DeviceMesh | None = None,
    modules: ModuleSelection = (),
    **options: Any,
) -> FSDPModule:
    """Apply torch's `fully_shard` bottom-up, with the `MixedPrecisionPolicy` that follows from a policy.

    It is applied to:

    - the modules selected by `modules`;
    - modules in another dtype than the module around them, each with its own `MixedPrecisionPolicy`. The cause is an
      override or, in mode "cast", batch normalisation's statistics;
    - finally the model itself.

    Args:
        model: on the mesh's device or on "meta"; sharded in place. Modules that are already sharded are unchanged.
        policy: the recipe's policy (`recipe.policy`, which includes its aliases) or its spelling.
        mesh: as in torch: one axis, or two for HSDP; None for all processes.
        modules: the modules that are gathered one after the other, usually the blocks. One or several globs over module
            paths (S5; each selects the outermost modules that it covers, aliases included) or classes.
        **options: torch's options, for every call: `reshard_after_forward`, `offload_policy`, `ignored_params`, ...

    Returns:
        The model, now a `torch.distributed.fsdp.FSDPModule`.

    Raises:
        ModelError: the model is not an `nn.Module`.
        ArgumentError: `mp_policy` is among the options.
        PolicyError: a glob or a class matches no module.
        UnsupportedError: a module that is never called would need its own policy; or the model is already sharded.

    Example:
        Under `torchrun --nproc-per-node 2`, in each process:

            model = polyamp_torch.fully_shard(model, recipe.policy, modules="blocks/*")
            state = polyamp.init(model, recipe)
    """
    from torch.distributed.fsdp import fully_shard as shard

    policy = Policy.of(policy)
    if not isinstance(model, nn.Module):
        raise ModelError(f"fully_shard shards an nn.Module. Received: {type(model).__name__}.")
    if "mp_policy" in options:
        raise ArgumentError(
            "mp_policy follows from the policy. To give one by hand, call torch.distributed.fsdp.fully_shard with "
            "mp_policy=polyamp_torch.mixed_precision_policy(policy)."
        )
    if fsdp2_state(model) is not None:
        raise UnsupportedError("the model is sharded already; fully_shard is called once for each model.")
    plan = resolve_policy(model, policy)
    for unit, mp_policy in _sharded_units(model, plan, _selected_modules(model, policy, modules)):
        shard(unit, mesh=mesh, mp_policy=mp_policy, **options)
    mp_policy = _unit_policy(plan, None, casts_inputs=True, output=plan.output)
    sharded: FSDPModule = shard(model, mesh=mesh, mp_policy=mp_policy, **options)
    return sharded


class _UnitContext(NamedTuple):
    """Context of a module's children: the dtype in which it is gathered, its compute dtype, and the module."""

    gathered: str
    computes: str
    owner: nn.Module


def _sharded_units(
    model: nn.Module, plan: ResolvedPolicy, selected: set[int]
) -> list[tuple[nn.Module, MixedPrecisionPolicy]]:
    """Return the modules below the root that form their own FSDP2 units, with their policies, the inner ones first."""
    paths = unwrapped_paths(model) if plan.overridden else {}
    found = {paths[path]: dtype for path, dtype in plan.overridden_dtypes.items()}
    root = dtype_in_module(plan, found, "", model)
    contexts = {"": _UnitContext(root, plan.compute if plan.cast else plan.param, model)}
    units = []
    for name, part in model.named_modules():
        path, outer = name.replace(".", "/"), contexts.get(name.rpartition(".")[0])
        if not name or outer is None or fsdp2_state(part) is not None or next(tree_parameters(part), None) is None:
            continue
        if isinstance(part, _CONTAINER_CLASSES):
            if id(part) in selected:
                raise UnsupportedError(
                    f"modules: {path!r} is a {type(part).__name__}, which is never called as a module: nothing would "
                    f"gather its parameters. Write {path + '/*'!r}."
                )
            contexts[name] = outer
            continue
        wanted = dtype_in_module(plan, found, path, part)
        is_unit = wanted != outer.gathered or id(part) in selected
        if is_unit and isinstance(outer.owner, nn.MultiheadAttention):
            raise UnsupportedError(
                f"{path!r} cannot be gathered by itself: MultiheadAttention uses its parameters without calling it. "
                f"Name {path.rpartition('/')[0]!r} instead."
            )
        computes = found.get(path, plan.compute) if plan.cast else plan.param
        contexts[name] = _UnitContext(wanted, computes, part)
        if is_unit:
            output = None if computes == outer.computes else outer.computes
            units.append((part, _unit_policy(plan, wanted, casts_inputs=output is not None, output=output)))
    return units[::-1]


def _unit_policy(
    plan: ResolvedPolicy, dtype: str | None, *, casts_inputs: bool = False, output: str | None = None
) -> MixedPrecisionPolicy:
    """Return the `MixedPrecisionPolicy` for one call of torch's `fully_shard`.

    Args:
        plan: the resolved policy.
        dtype: the dtype of the unit's parameters in their modules; None for that of the whole model.
        casts_inputs: whether the unit's inputs are cast to that dtype, in mode "cast".
        output: the dtype of the unit's outputs, in mode "cast"; None for the dtype that it computes.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    casts = plan.cast and plan.policy.is_mixed
    wanted = (plan.compute if casts else plan.param) if dtype is None else dtype
    return MixedPrecisionPolicy(
        param_dtype=DTYPES[wanted] if wanted != plan.param or (casts and casts_inputs) else None,
        reduce_dtype=torch.float64 if plan.param == "float64" else torch.float32,
        output_dtype=DTYPES[output] if casts and output is not None else None,
        cast_forward_inputs=casts and casts_inputs,
    )


def _selected_modules(model: nn.Module, policy: Policy, modules: ModuleSelection) -> set[int]:
    """Return the ids of the modules that `modules=` selects."""
    asked = [modules] if isinstance(modules, str | type) else list(modules)
    if not asked:
        return set()
    known = {"": "", **unwrapped_paths(model)}
    named = path_aliases.expand_aliases(policy.aliases, "torch", [(path,) for path in known])
    names = dict(zip(known, named, strict=True))
    chosen: set[int] = set()
    for one in asked:
        if not (isinstance(one, type) and issubclass(one, nn.Module)):
            chosen.update(
                id(model.get_submodule(known[path].replace("/", "."))) for path in _matching_paths(one, names)
            )
        elif found := [part for part in model.modules() if isinstance(part, one)]:
            chosen.update(map(id, found))
        else:
            raise PolicyError(f"modules: the model has no module of the class {one.__name__}.")
    return chosen - {id(model)}


def _matching_paths(one: Any, names: dict[str, tuple[str, ...]]) -> Iterable[str]:
    """Return the paths that a glob selects: the outermost of the modules that it covers."""
    overrides.check_glob(one, argument="modules: an entry")
    overrides.check_all_match([one], (name for own in names.values() for name in own), argument="modules")
    covered = {path for path, own in names.items() if any(overrides.covers(one, name) for name in own)}
    return [path for path in covered if path and path.rpartition("/")[0] not in covered]


def check_fsdp_precision(model: nn.Module, plan: ResolvedPolicy) -> None:
    """Raise if the model's units gather, reduce or return in other dtypes than the policy defines.

    Accepted are the policies that `fully_shard` derives, and equivalent ones:

    - in mode "autocast", torch's default, `MixedPrecisionPolicy()`;
    - a wider `reduce_dtype`;
    - in mode "cast", units that cast their inputs.

    Raises:
        UnsupportedError: a dtype differs; the message names the module, the field, the value received and the remedy.
    """
    gathered = gathered_fsdp2_parameters(model.modules())
    if not gathered:
        return
    names = {id(part): name.replace(".", "/") for name, part in model.named_modules()}
    paths = unwrapped_paths(model) if plan.overridden else {}
    found = {paths[path]: dtype for path, dtype in plan.overridden_dtypes.items()}
    for each in gathered:
        for owner, name in each.places:
            path = names.get(id(owner), "")
            wanted = dtype_in_module(plan, found, path, owner)
            _check_parameter(each, f"{path}/{name}".lstrip("/"), wanted, plan)
        unit = names.get(id(each.unit), "")
        _check_output(each.policy, unit, found, plan)


def _check_parameter(each: GatheredParameter, path: str, wanted: str, plan: ResolvedPolicy) -> None:
    """Check the dtype in which a parameter is gathered, and the one in which its gradient is reduced."""
    stored = each.sharded.dtype
    if not stored.is_floating_point:
        return
    mp_policy = each.policy
    gathered = mp_policy.param_dtype or stored
    if gathered is not DTYPES[wanted]:
        raise UnsupportedError(_contradiction_message(path, "param_dtype", gathered, wanted, plan))
    reduced = dtype_name(mp_policy.reduce_dtype or mp_policy.param_dtype or stored)
    if reduced != plan.param and (reduced in HALF_DTYPES or DTYPES[reduced].itemsize < stored.itemsize):
        least = "float64" if plan.param == "float64" else "float32"
        raise UnsupportedError(_contradiction_message(path, "reduce_dtype", DTYPES[reduced], least, plan))


def _check_output(mp_policy: Any, unit: str, found: dict[str, str], plan: ResolvedPolicy) -> None:
    """Check a unit's output dtype: the policy's for the model; in mode "cast", for inner units, a compute dtype."""
    if mp_policy.output_dtype is None:
        return
    whole = set(unit.split("/")) <= {"", *(attribute for _, _, attribute in WRAPPER_CLASSES)}
    inner = {plan.compute, *found.values()} if plan.cast else set()
    if dtype_name(mp_policy.output_dtype) not in ({plan.output} if whole else inner):
        wanted = plan.output if whole else plan.compute if plan.cast else None
        raise UnsupportedError(_contradiction_message(unit, "output_dtype", mp_policy.output_dtype, wanted, plan))


def _contradiction_message(path: str, field: str, came: Any, wanted: str | None, plan: ResolvedPolicy) -> str:
    what = f"{path!r}" if path else "the model"
    said = "None" if wanted is None else f"torch.{wanted}"
    reasons = {
        "param_dtype": "the dtype in which it is gathered for the forward pass",
        "reduce_dtype": "the dtype in which its gradient is reduced over the ranks",
        "output_dtype": "the dtype of what it returns",
    }
    message = (
        f"mp_policy: {what} was sharded with a MixedPrecisionPolicy that contradicts {plan.policy!r}: {field} "
        f"({reasons[field]}) must come to {said}. Received: {came}. Shard with polyamp_torch.fully_shard(model, "
        "policy, modules=...), or with torch's fully_shard and mp_policy=polyamp_torch.mixed_precision_policy(policy)."
    )
    if field == "param_dtype" and not plan.cast and came is DTYPES[plan.compute]:
        message += f" To compute with weights gathered in {plan.compute}, write Policy(..., mode='cast')."
    return message
