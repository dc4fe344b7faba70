"""FSDP2's `MixedPrecisionPolicy` from a `Policy`: what is gathered, and in which dtype gradients are reduced.

    mode "autocast"   masters are gathered in their own dtype, and each operation casts as in one process
    mode "cast"       masters are gathered as their casts, which FSDP2 makes before it sends them
    in both           gradients are reduced in float32, or in the masters' dtype where that is wider

What a normalisation or an embedding has in 16 bits cannot be told from what a product has: in mode "autocast" weights
gathered in 16 bits would be others than in one process. `fully_shard` and `mixed_precision_policy` are the public
functions; `check_precision` is called where a model comes in, by `init` and `policy.autocast`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import nn

from polyamp.errors import ArgumentError, ModelError, PolicyError, UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp.rules import aliases, overrides
from polyamp.rules.plan import NARROW, Plan
from polyamp_torch.arrays import DTYPES, dtype_name
from polyamp_torch.compat import WRAPPERS, Gathered, children_in, fsdp2_state, gathered_by_fsdp2
from polyamp_torch.precision.cast_mode import dtype_in_module
from polyamp_torch.precision.parameter_listing import tree_parameters
from polyamp_torch.precision.paths import inner_paths, plan_for

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

_NEVER_CALLED: Final = (nn.ModuleList, nn.ModuleDict)
Modules = str | type[nn.Module] | Sequence[str | type[nn.Module]]


def mixed_precision_policy(policy: Policy | str) -> MixedPrecisionPolicy:
    """The `torch.distributed.fsdp.MixedPrecisionPolicy` for the units that `torch.distributed.fsdp.fully_shard` makes.

    In mode "autocast" (torch's default mode) parameters are gathered as they are stored, so that results are those of
    one process, bit for bit. In mode "cast" they are gathered in the policy's `compute` dtype. Gradients are reduced in
    float32 in both: on the way in float16 a scaled gradient of 70,000 is infinite, one of 50,000 is 49,984, and what
    is smaller than 6e-8 is lost.

    Modules that `overrides` keep in another dtype, and batch normalisation in mode "cast", need units of their own:
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
    return _unit_policy(Plan(Policy.of(policy), {}), None, casts_inputs=True)


def fully_shard(
    model: nn.Module,
    policy: Policy | str,
    *,
    mesh: DeviceMesh | None = None,
    modules: Modules = (),
    **options: Any,
) -> FSDPModule:
    """Torch's `fully_shard`, bottom-up, with the `MixedPrecisionPolicy` that follows from a policy.

    It is applied to the named modules, to those that an override (or, in mode "cast", batch normalisation's statistics)
    keeps in another dtype than what is around them, which get a policy of their own, and to the model at last.

    Args:
        model: on the mesh's device or on "meta"; sharded in place. Submodules that are sharded already stay so.
        policy: the recipe's (`recipe.policy`, which has its aliases) or its spelling.
        mesh: as torch has it: one axis, or two for HSDP; None for all processes.
        modules: what is gathered one after the other, usually the blocks: globs over module paths (S5; of what a glob
            covers the outermost modules, aliases included) or classes, one or several.
        **options: torch's, for every call: `reshard_after_forward`, `offload_policy`, `ignored_params`, ...

    Returns:
        The model, now a `torch.distributed.fsdp.FSDPModule`.

    Raises:
        ModelError: not a module.
        ArgumentError: `mp_policy` among the options.
        PolicyError: a glob or a class matches no module.
        UnsupportedError: a module that is never called would need a policy of its own; or the model is sharded already.

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
    plan = plan_for(model, policy)
    for unit in _units(model, plan, _selected(model, policy, modules)):
        shard(unit.module, mesh=mesh, mp_policy=unit.policy, **options)
    mp_policy = _unit_policy(plan, None, casts_inputs=True, output=plan.output)
    sharded: FSDPModule = shard(model, mesh=mesh, mp_policy=mp_policy, **options)
    return sharded


class _Unit(NamedTuple):
    """A module below the root that is gathered by itself."""

    module: nn.Module
    policy: MixedPrecisionPolicy


class _Around(NamedTuple):
    """What is known of the surroundings of a module: the dtype in which its unit is gathered, the dtype in which the
    module around it computes, and that module."""

    gathered: str
    computes: str
    owner: nn.Module


def _units(model: nn.Module, plan: Plan, selected: set[int]) -> Iterator[_Unit]:
    """The modules below the root that are sharded by themselves, the inner ones first."""
    paths = inner_paths(model) if plan.overridden else {}
    found = {paths[path]: dtype for path, dtype in plan.overridden.items()}
    seen: set[int] = {id(model)}

    def inside(module: nn.Module, path: str, around: _Around) -> Iterator[_Unit]:
        for name, part in children_in(module).items():
            if part is None or id(part) in seen or fsdp2_state(part) is not None:
                continue
            seen.add(id(part))
            yield from below(part, f"{path}/{name}".lstrip("/"), around)

    def below(part: nn.Module, path: str, around: _Around) -> Iterator[_Unit]:
        wanted = dtype_in_module(plan, found, path, part)
        if next(tree_parameters(part), None) is None:
            return
        if isinstance(part, _NEVER_CALLED):
            if id(part) in selected:
                raise UnsupportedError(
                    f"modules: {path!r} is a {type(part).__name__}, which is never called as a module: nothing would "
                    f"gather its parameters. Write {path + '/*'!r}."
                )
            yield from inside(part, path, around)
            return
        alone = wanted != around.gathered
        if (alone or id(part) in selected) and isinstance(around.owner, nn.MultiheadAttention):
            raise UnsupportedError(
                f"{path!r} cannot be gathered by itself: MultiheadAttention uses its parameters without calling it. "
                f"Name {path.rpartition('/')[0]!r} instead."
            )
        computes = found.get(path, plan.compute) if plan.cast else plan.param
        here = _Around(wanted if alone else around.gathered, computes, part)
        yield from inside(part, path, here)
        if alone or id(part) in selected:
            other = computes != around.computes
            yield _Unit(part, _unit_policy(plan, wanted, casts_inputs=other, output=around.computes if other else None))

    root = dtype_in_module(plan, found, "", model)
    yield from inside(model, "", _Around(root, plan.compute if plan.cast else plan.param, model))


def _unit_policy(
    plan: Plan, dtype: str | None, *, casts_inputs: bool = False, output: str | None = None
) -> MixedPrecisionPolicy:
    """What one call of torch's `fully_shard` is given.

    Args:
        plan: the policy.
        dtype: in which the unit's parameters stand in their modules; None for that of the whole model.
        casts_inputs: whether what goes into the unit is cast to that dtype, in mode "cast".
        output: the dtype of what comes out of it, in mode "cast"; None for what the unit computes.
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


def _selected(model: nn.Module, policy: Policy, modules: Modules) -> set[int]:
    """The ids of the modules that `modules=` names."""
    asked = [modules] if isinstance(modules, str | type) else list(modules)
    if not asked:
        return set()
    known = {"": "", **inner_paths(model)}
    named = aliases.named(policy.aliases, "torch", [(path,) for path in known])
    names = dict(zip(known, named, strict=True))
    chosen: set[int] = set()
    for one in asked:
        if not (isinstance(one, type) and issubclass(one, nn.Module)):
            chosen.update(id(model.get_submodule(known[path].replace("/", "."))) for path in _matching(one, names))
        elif found := [part for part in model.modules() if isinstance(part, one)]:
            chosen.update(map(id, found))
        else:
            raise PolicyError(f"modules: the model has no module of the class {one.__name__}.")
    return chosen - {id(model)}


def _matching(one: Any, names: dict[str, tuple[str, ...]]) -> Iterable[str]:
    """The paths that a glob selects: of the modules that it covers, the outermost."""
    overrides.check_glob(one, argument="modules: an entry")
    overrides.check_all_match([one], (name for own in names.values() for name in own), argument="modules")
    covered = {path for path, own in names.items() if any(overrides.covers(one, name) for name in own)}
    return [path for path in covered if path and path.rpartition("/")[0] not in covered]


def check_precision(model: nn.Module, plan: Plan) -> None:
    """Refuse a model whose units gather, reduce or return in other dtypes than the policy says.

    Accepted are what `fully_shard` derives, and what comes to the same: torch's default, `MixedPrecisionPolicy()`, in
    mode "autocast", a wider `reduce_dtype`, and in mode "cast" units that cast their inputs.

    Raises:
        UnsupportedError: names the module, the field, what came and what to write.
    """
    gathered = gathered_by_fsdp2(model.modules())
    if not gathered:
        return
    names = {id(part): name.replace(".", "/") for name, part in model.named_modules()}
    paths = inner_paths(model) if plan.overridden else {}
    found = {paths[path]: dtype for path, dtype in plan.overridden.items()}
    for each in gathered:
        for owner, name in each.places:
            path = names.get(id(owner), "")
            wanted = dtype_in_module(plan, found, path, owner)
            _check_one(each, f"{path}/{name}".lstrip("/"), wanted, plan)
        unit = names.get(id(each.unit), "")
        _check_output(each.policy, unit, found, plan)


def _check_one(each: Gathered, path: str, wanted: str, plan: Plan) -> None:
    """One parameter: the dtype in which it is gathered, and the one in which its gradient is reduced."""
    stored = each.sharded.dtype
    if not stored.is_floating_point:
        return
    mp_policy = each.policy
    gathered = mp_policy.param_dtype or stored
    if gathered is not DTYPES[wanted]:
        raise UnsupportedError(_contradiction(path, "param_dtype", gathered, wanted, plan))
    reduced = dtype_name(mp_policy.reduce_dtype or mp_policy.param_dtype or stored)
    if reduced != plan.param and (reduced in NARROW or DTYPES[reduced].itemsize < stored.itemsize):
        least = "float64" if plan.param == "float64" else "float32"
        raise UnsupportedError(_contradiction(path, "reduce_dtype", DTYPES[reduced], least, plan))


def _check_output(mp_policy: Any, unit: str, found: dict[str, str], plan: Plan) -> None:
    """What a unit returns: the model the policy's output, in mode "cast" an inner one what is computed around it."""
    if mp_policy.output_dtype is None:
        return
    whole = set(unit.split("/")) <= {"", *(attribute for _, _, attribute in WRAPPERS)}
    inner = {plan.compute, *found.values()} if plan.cast else set()
    if dtype_name(mp_policy.output_dtype) not in ({plan.output} if whole else inner):
        wanted = plan.output if whole else plan.compute if plan.cast else None
        raise UnsupportedError(_contradiction(unit, "output_dtype", mp_policy.output_dtype, wanted, plan))


def _contradiction(path: str, field: str, came: Any, wanted: str | None, plan: Plan) -> str:
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
