"""From optimizer specs to `torch.optim`, and one step of any torch optimizer under a finite flag.

SGD, Adam and AdamW use torch's fused kernels, which take the flag and the divisor themselves. RMSprop, Adagrad and Lion
run polyamp's own formulas over multi-tensor kernels, and select by the flag on the device. Neither synchronises with
the host. What cannot be told on the device reads the flag once a step: native optimizers without fused kernels, or
without their state yet, and parameters that the fused kernels do not take.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from polyamp.errors import UnsupportedError
from polyamp.recipe.members import Member, Members
from polyamp.recipe.optimizers import SGD, Adagrad, Adam, AdamW, Lion, RMSprop, is_spec
from polyamp_torch.compat import foreach_add, foreach_add_, foreach_copy_, local_of, takes_found_inf
from polyamp_torch.step.kernels import Kernels, counts_for
from polyamp_torch.step.measure import buckets, looks
from polyamp_torch.step.multi_tensor import MANY, Many
from polyamp_torch.step.rates import Rates

Parameters = list[torch.nn.Parameter]
_SLOTS: Final = {"momentum": "momentum_buffer"}
"""torch's names for the slots of polyamp's formulas, where they differ."""
_AT_ONCE: Final = 2**25
"""Elements that a formula runs over at once, which bounds the memory of its intermediate results."""


class LionOptimizer(torch.optim.Optimizer):
    """Lion (arxiv.org/abs/2302.06675) with decoupled decay; torch.optim has none."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update with multi-tensor kernels."""
        if closure is not None:
            raise UnsupportedError("Lion takes no closure.")
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and "exp_avg" not in self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
            spec = Lion(group["lr"], betas=group["betas"], weight_decay=group["weight_decay"])
            _run_formula(self, group, spec, group["lr"], 0, None)
        return None


def build(groups: Members, named: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The torch optimizer for a spec, with its state arrays made; a native one is checked and returned.

    Args:
        groups: the recipe's optimizer, resolved against the parameters; a parameter group for each set of
            hyperparameters.
        named: path -> parameter.

    Raises:
        UnsupportedError: a native object that is not an optimizer over exactly these parameters.
    """
    optimizer, parameters = groups.distinct[0].spec, list(named.values())
    if is_spec(optimizer):
        return _from_spec(groups, named)
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
    """Refuse parameters that torch's fused kernels train wrongly."""
    gaps = [p for p in group["params"] if not _is_dense(p)]
    if gaps:
        raise UnsupportedError(
            "torch's fused optimizers write beside parameters that have gaps in memory, such as slices. Received: "
            f"fused=True with a parameter of shape {tuple(gaps[0].shape)} and strides {gaps[0].stride()}. "
            "Use fused=False, or make the parameter contiguous."
        )
    narrow = [p for p in group["params"] if p.device.type == "cpu" and p.dtype in (torch.float16, torch.bfloat16)]
    if isinstance(optimizer, torch.optim.SGD) and narrow:
        raise UnsupportedError(
            "torch's fused SGD leaves whole blocks of 16-bit parameters as they were on the CPU "
            f"(github.com/pytorch/pytorch/issues/191763). Received: fused=True with {narrow[0].dtype}. Use fused=False."
        )


def _is_dense(p: torch.Tensor) -> bool:
    """True if a tensor's elements lie in memory without gaps, in whatever order; only then torch keeps its strides."""
    p = local_of(p)
    return p.numel() < 2 or torch.empty_like(p, device="meta").stride() == p.stride()


def _from_spec(groups: Members, named: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    spec, held = groups.distinct[0].spec, _by_group(groups, named)
    parameters = [p for part in held for p in part]
    wide = (torch.float32, torch.float64, torch.complex64, torch.complex128)
    fused = all((p.dtype in wide or p.device.type == "cuda") and _is_dense(p) for p in parameters)  # see _refuse_fused
    first = _options(groups.distinct[0])
    parts: Any = parameters
    if not groups.alike:
        parts = [{"params": part, **_options(m)} for part, m in zip(held, groups.distinct, strict=True)]
    made: torch.optim.Optimizer
    match spec:
        case SGD():
            made = torch.optim.SGD(parts, **first, fused=fused)
        case Adam() | AdamW():
            made = (torch.optim.AdamW if isinstance(spec, AdamW) else torch.optim.Adam)(parts, **first, fused=fused)
        case RMSprop():
            made = torch.optim.RMSprop(parts, **first)
        case Adagrad():
            made = torch.optim.Adagrad(parts, **first)
        case Lion():
            made = LionOptimizer(parts, **first)
        case _:
            raise UnsupportedError(f"the torch backend has no optimizer for {type(spec).__name__}.")
    _fill(made, groups, held, fused)
    return made


def _by_group(groups: Members, named: Mapping[str, torch.nn.Parameter]) -> list[Parameters]:
    """The parameters of each set of hyperparameters."""
    held: list[Parameters] = [[] for _ in groups.distinct]
    for path, p in named.items():
        held[groups.numbers[path]].append(p)
    return held


def _options(member: Member) -> dict[str, Any]:
    """A parameter group's options, which torch calls as polyamp does but for the rate."""
    rate = member.learning_rate
    options = {name: getattr(member.spec, name) for name in member.spec.hyperparameters}
    return {"lr": float(rate(0)) if callable(rate) else rate, **options}


def _fill(optimizer: torch.optim.Optimizer, groups: Members, held: list[Parameters], fused: bool) -> None:
    """Make the state arrays now: a checkpoint then always holds them, and fused SGD, whose momentum is left
    uninitialised when its very first step is skipped, never sees a missing one."""
    parameters = [p for part in held for p in part]
    spec = groups.distinct[0].spec
    counts = isinstance(spec, Adam | AdamW | RMSprop | Adagrad)
    together = fused and len({p.device for p in parameters}) == 1
    laid = iter(counts_for(len(parameters), parameters[0].device) if together else ())
    for part, member in zip(held, groups.distinct, strict=True):
        for p in part:
            if counts:
                device = p.device if fused or runs_formula(spec) else torch.device("cpu")
                own = torch.zeros((), dtype=torch.float32, device=device) if not together else next(laid)
                optimizer.state[p]["step"] = own
            for slot in spec.slots:
                value: complex = member.spec.initial(slot)
                value = complex(value, value) if p.is_complex() else value  # of both parts
                optimizer.state[p][slot_name(slot)] = torch.full_like(p, value, memory_format=torch.preserve_format)


def part_counts(optimizer: torch.optim.Optimizer) -> None:
    """Give every step count memory of its own, as a compiler wants what it writes to."""
    for slots in optimizer.state.values():
        if isinstance(slots.get("step"), torch.Tensor):
            slots["step"] = slots["step"].clone()


def slot_name(slot: str) -> str:
    """torch's name of a formula's slot."""
    return _SLOTS.get(slot, slot)


def runs_formula(spec: Any) -> bool:
    """True for the specs whose formula runs here, because torch's kernels for them take no flag."""
    return isinstance(spec, RMSprop | Adagrad | Lion)


def is_float64(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the parameters are float64, so that what acts on them is float64 as well (S1)."""
    wide = (torch.float64, torch.complex128)
    return any(p.dtype in wide for group in optimizer.param_groups for p in group["params"][:1])


def takes_divisor(optimizer: torch.optim.Optimizer) -> bool:
    """True when the optimizer's kernels divide the gradients by `grad_scale` themselves: fused ones, in float32."""
    return _is_fused(optimizer) and all(
        group["params"][0].dtype in (torch.float32, torch.complex64)
        for group in optimizer.param_groups
        if group["params"]
    )


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    return takes_found_inf(optimizer) and all(
        group.get("fused") and not group.get("foreach") for group in optimizer.param_groups
    )


def _takes_flag(optimizer: torch.optim.Optimizer, spec: Any) -> bool:
    """True when the optimizer's kernels take the flag: fused, and with every state array already there."""
    if not _is_fused(optimizer):
        return False
    if is_spec(spec) or stateless(optimizer):
        return True
    held = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    return all(optimizer.state.get(p) for p in held)


def apply(
    optimizer: torch.optim.Optimizer,
    spec: Any,
    applied: torch.Tensor,
    finite: torch.Tensor | None,
    by: torch.Tensor | None = None,
    grads: list[torch.Tensor] | None = None,
    kernels: Kernels | None = None,
    rates: Rates | None = None,
    groups: Members | None = None,
) -> None:
    """Step the optimizer over the parameters' `.grad` if `finite`, at the rate of the applied-update count (S13).

    Args:
        optimizer: what `build` returned.
        spec: the recipe's optimizer, a spec or native.
        applied: number of updates so far; its device says where the flag may be read.
        finite: the flag, or None for one that is not checked.
        by: a float32 scalar that the kernels divide the gradients by, writing the quotients back; only for an
            optimizer that `takes_divisor`.
        grads: the gradients again, as a list; and
        kernels: what `kernels_of` returned, which takes them.
        rates: what `rates_of` returned.
        groups: the sets of hyperparameters, where a spec has parameter groups.
    """
    if finite is not None and looks(applied.device):
        if not bool(finite):
            return
        finite = None
    if runs_formula(spec):
        if rates is not None:
            rates.set(applied)
        here = looks(applied.device)
        count = int(applied) + 1 if here else (applied.double() if is_float64(optimizer) else applied) + 1.0
        for number, group in enumerate(optimizer.param_groups):
            own = spec if groups is None else spec_of(groups, number)
            _run_formula(optimizer, group, current(own, group), group["lr"], count, finite)
        return
    if finite is not None and not _takes_flag(optimizer, spec):
        if not bool(finite):  # the one synchronisation: this optimizer cannot be told on the device
            return
        finite = None
    if rates is not None:
        rates.set(applied)
    found_inf = None if finite is None else (~finite).float()
    if kernels is None or grads is None or not kernels.run(grads, found_inf, by):
        _step(optimizer, found_inf, by)


def kernels_of(optimizer: torch.optim.Optimizer, spec: Any, parameters: Sequence[torch.nn.Parameter]) -> Kernels | None:
    """The optimizer's fused kernels, to be run without `optimizer.step()` on gradients in the order of `parameters`;
    None for what is native or not fused."""
    return Kernels(optimizer, parameters) if is_spec(spec) and _is_fused(optimizer) else None


def rates_of(optimizer: torch.optim.Optimizer, groups: Members) -> Rates | None:
    """The rates of the groups under schedules; None where there is no schedule of polyamp's."""
    if not is_spec(groups.distinct[0].spec):
        return None
    schedules = [member.spec.learning_rate for member in groups.distinct]
    scheduled = [rate if callable(rate) else None for rate in schedules]
    if not any(scheduled):
        return None
    return Rates(optimizer, scheduled, [member.scale for member in groups.distinct], float64=is_float64(optimizer))


def spec_of(groups: Members, number: int) -> Any:
    """The spec of a parameter group of the optimizer; all have one unless the recipe has groups."""
    return groups.distinct[number if not groups.alike else 0].spec


def _step(optimizer: Any, found_inf: torch.Tensor | None, by: torch.Tensor | None) -> None:
    """`optimizer.step()`, its kernels given the flag and the divisor."""
    if found_inf is None and by is None:
        optimizer.step()
        return
    optimizer.found_inf = found_inf
    optimizer.grad_scale = by
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf, optimizer.grad_scale


def _run_formula(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    spec: Any,
    rate: Any,
    count: Any,
    finite: torch.Tensor | None,
) -> None:
    """A spec's own formula over one group, in float32 at least; selected by `finite` unless that is None."""
    for parameters in _portions([p for p in group["params"] if p.grad is not None]):
        device = parameters[0].device
        states = [optimizer.state[p] for p in parameters]
        old = {slot: [state[slot_name(slot)] for state in states] for slot in spec.slots}
        own = None if finite is None else finite.to(device)
        with torch.no_grad():
            new, slots = spec.update(
                MANY,
                _wide(parameters),
                _wide([p.grad for p in parameters]),
                {slot: _wide(tensors) for slot, tensors in old.items()},
                _on(rate, device),
                _count(spec, states, _on(count, device)),
            )
            for before, after in [(parameters, new), *((old[slot], slots[slot]) for slot in old)]:
                chosen = after if own is None else MANY.where(own, after, Many(list(before)))
                foreach_copy_(list(before), chosen.tensors)
            steps = [state["step"] for state in states if "step" in state]
            if steps:
                if own is None:
                    foreach_add_(steps, 1.0)
                else:
                    foreach_add_(steps, own.float(), alpha=1.0)  # without alpha torch reads the tensor


def _count(spec: Any, states: list[dict[str, Any]], shared: Any) -> Any:
    """The number of this update for a formula that asks for it: each parameter's own, where they can differ (S23)."""
    if not isinstance(spec, Adagrad) or not spec.lr_decay:
        return shared
    taken = [state["step"] for state in states]
    if looks(taken[0].device) and len(numbers := {count.item() for count in taken}) == 1:
        return numbers.pop() + 1.0
    if states[0]["sum"].dtype == torch.float64:
        taken = [count.double() for count in taken]
    return Many(list(foreach_add(taken, 1.0)))


def check_options(optimizer: torch.optim.Optimizer, spec: Any, groups: Members) -> None:
    """Refuse options that were written into the groups by hand and would be passed over; a native one has its own.

    Raises:
        UnsupportedError: names the option.
        RecipeError: an impossible value.
    """
    if not is_spec(spec):
        return
    for number, group in enumerate(optimizer.param_groups):
        if runs_formula(spec):
            current(spec_of(groups, number), group)
        decoupled = group.get("decoupled_weight_decay", isinstance(spec, AdamW))
        for name, differs in (
            ("amsgrad", group.get("amsgrad")),
            ("decoupled_weight_decay", decoupled != isinstance(spec, AdamW)),
        ):
            if differs:
                raise UnsupportedError(
                    f"{name}={group[name]} was written into the optimizer's param_groups; {type(spec).__name__} has no "
                    f"such option. Give the recipe torch.optim.{type(spec).__name__}(..., {name}={group[name]})."
                )


def current(spec: Any, group: dict[str, Any]) -> Any:
    """The spec with the options that were written into the group by hand.

    Raises:
        UnsupportedError: they ask for other state arrays, or for `maximize`, which the formulas do not have.
        RecipeError: an impossible value.
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


def _wide(tensors: list[Any]) -> Many:
    if tensors[0].dtype in (torch.float16, torch.bfloat16):
        return Many([tensor.float() for tensor in tensors])
    return Many(tensors)


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _portions(parameters: list[Any]) -> Iterator[list[Any]]:
    """Parameters of one device and dtype, `_AT_ONCE` elements at a time."""
    for bucket in buckets(parameters):
        portion: list[Any] = []
        size = 0
        for p in bucket:
            if portion and size + p.numel() > _AT_ONCE:
                yield portion
                portion, size = [], 0
            portion.append(p)
            size += p.numel()
        yield portion


def stateless(optimizer: torch.optim.Optimizer) -> bool:
    """True for plain SGD, which keeps nothing between steps."""
    return isinstance(optimizer, torch.optim.SGD) and not any(group["momentum"] for group in optimizer.param_groups)
