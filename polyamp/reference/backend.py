"""Reference backend: `semantics.md` in NumPy, with one function per stage of the step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from polyamp.contract.backend import Backend, BackendInfo, ValueAndGrad
from polyamp.contract.harness import Harness
from polyamp.display import StateDisplayMixin
from polyamp.errors import GradientError, ModelError, UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp.recipe.scaler import LossScaleState
from polyamp.reference import tensor as ops
from polyamp.reference.arrays import XP, Array, cast_tree, dtype_name, is_floating
from polyamp.reference.forward_backward import accumulate_gradients, prepare_batch, single_batch_gradients
from polyamp.reference.harness import ReferenceHarness
from polyamp.reference.losses import ReferenceLosses
from polyamp.reference.models import MLP, PolicyMLP
from polyamp.reference.monitor_slots import ReferenceWatch, update_slots
from polyamp.reference.tensor import Tensor
from polyamp.results import Gradients, LossFunction, StepFunction, StepResult
from polyamp.rules import clip, step_checks
from polyamp.rules.averages import average_share, averaged_paths, move_average
from polyamp.rules.batches import micro_batches
from polyamp.rules.group_members import GroupMembers, resolve_group_members
from polyamp.rules.parameter_kinds import ParameterLeaf
from polyamp.rules.refresh import KnownParameter, RefreshPlan, missing_model_error
from polyamp.rules.stuck_scale import StuckScaleMonitor
from polyamp.rules.update_decision import GradStats, Skip, UpdateDecision, decide
from polyamp.trees import map_tree

if TYPE_CHECKING:
    from polyamp.parity.trace.observer import Observer
    from polyamp.porting.layouts.converter import Converter
    from polyamp.porting.states.optimizer_layout import StateConverter


class ReferenceState(StateDisplayMixin, msgspec.Struct, frozen=True, kw_only=True):
    """Training state of a reference model; every step returns a new one."""

    model: MLP
    recipe: Recipe
    plan: ResolvedPolicy
    groups: GroupMembers
    slots: dict[str, dict[str, Array]]
    counts: dict[str, Array]
    """Parameter -> number of its updates (S23)."""
    scale_state: LossScaleState
    step: Array
    averages: dict[str, dict[str, Array]] = msgspec.field(default_factory=dict)
    """"model" and "running" -> path -> average (S34)."""
    watch: StuckScaleMonitor = msgspec.field(default_factory=StuckScaleMonitor)

    @property
    def backend(self) -> Backend:
        return BACKEND

    def _place(self) -> tuple[str, int]:
        return "cpu", sum(value.size for value in self.model.parameters.values())

    __repr__ = StateDisplayMixin.__repr__


class ReferenceBackend:
    """`Backend` over NumPy."""

    name = "reference"
    monitors_steps = True
    has_float8_products = True
    state_type: type[ReferenceState] = ReferenceState
    xp = XP
    losses = ReferenceLosses()
    cast = staticmethod(cast_tree)

    def info(self) -> BackendInfo:
        return BackendInfo("numpy", np.__version__, ("cpu",))

    def scalar(self, value: float, dtype: str, *, like: Any = None) -> Any:
        return np.asarray(value, dtype)

    def to_numpy(self, array: Any) -> Array:
        return np.array(array.data if isinstance(array, Tensor) else array)

    def is_concrete(self, array: Any) -> bool:
        return True

    def native_policy(self, policy: Policy) -> Any:
        plan = policy.plan()
        return ops.casting_mode(plan.compute, sensitive=plan.kept)

    def autocast(self, target: Any, policy: Policy) -> Callable[..., Any]:
        if isinstance(target, PolicyMLP):  # in loss_fn: the second policy applies (S3)
            target = target.model
        if isinstance(target, MLP):
            return PolicyMLP(target, policy.plan(target.module_paths(), backend=self.name)).__call__
        if policy.float8 is not None:
            raise UnsupportedError("float8 covers products with the parameters of a model (S36). Pass an MLP.")
        plan = policy.plan()

        @functools.wraps(target)
        def call(*args: Any, **kwargs: Any) -> Any:
            if plan.cast:
                args, kwargs = cast_tree((args, kwargs), plan.compute)
            with ops.casting_mode(plan.compute, sensitive=plan.kept), np.errstate(all="ignore"):
                result = target(*args, **kwargs)
            return map_tree(lambda leaf: ops.cast(leaf, plan.output) if isinstance(leaf, Tensor) else leaf, result)

        return call

    def scale_loss(self, loss: Any, scale: Any | None) -> Any:
        source = ops.tensor(loss)
        step_checks.check_loss(source.shape, dtype_name(source.dtype), what="scale()")
        wide = ops.cast(source, "float32")
        scaled = wide if scale is None else wide * scale
        return scaled if isinstance(loss, Tensor) else scaled.data

    def unscale(self, grads: Any, scale: Any | None) -> tuple[Any, Any]:
        finite = [True]

        def one(leaf: Any) -> Any:
            if leaf is None:
                return None
            if not is_floating(leaf):
                raise GradientError(f"gradients must be floating arrays. Received: {leaf!r}.")
            wide = np.asarray(leaf, np.float32)
            result = wide if scale is None else wide / scale
            finite.append(bool(np.isfinite(result).all()))
            return result

        with np.errstate(all="ignore"):
            unscaled = map_tree(one, grads)
        if len(finite) == 1:
            raise GradientError("unscale() got no gradients.")
        return unscaled, np.asarray(all(finite))

    def regularization(self, model: Any) -> Any:
        return np.zeros((), np.float32)

    def parameters(self, model: Any) -> dict[str, Any]:
        return dict((model.model if isinstance(model, PolicyMLP) else model).parameters)

    def init(self, model: Any, recipe: Recipe, **options: Any) -> ReferenceState:
        step_checks.check_options(options, (), function="init", backend=self.name)
        if not isinstance(model, MLP):
            raise ModelError(
                f"the reference backend trains polyamp.reference.MLP. Received: {type(model).__name__}. For a model of "
                "another framework whose parameters are NumPy arrays, name it: polyamp.init(..., backend='jax')."
            )
        parameters = [(name, dtype_name(value.dtype)) for name, value in model.parameters.items()]
        step_checks.check_parameters(parameters, recipe)
        plan = recipe.policy.plan(model.module_paths(), backend=self.name)
        spec = recipe.optimizer
        if not hasattr(spec, "slots"):
            raise UnsupportedError("NumPy has no optimizers of its own; use one of polyamp's specs.")
        leaves = [ParameterLeaf(name, value.ndim) for name, value in model.parameters.items()]
        groups = resolve_group_members(recipe, model.parameters, lambda: leaves, backend=self.name)
        slots = {
            name: {
                slot: np.full(member.slot_shape(slot, value.shape), member.initial(slot), value.dtype)
                for slot in spec.slots
            }
            for name, value in model.parameters.items()
            for member in (groups.of(name).spec,)
        }
        fresh = model.with_arrays(map_tree(np.array, model.parameters), map_tree(np.array, model.running))
        scale_state = recipe.loss_scaler.init(self.name)
        zero = np.asarray(0, np.int32)
        counts = dict.fromkeys(model.parameters, zero)
        averages = _wide_values(fresh, averaged_paths(recipe, model.parameters, backend=self.name), recipe)
        return self.state_type(
            model=fresh,
            recipe=recipe,
            plan=plan,
            groups=groups,
            slots=slots,
            counts=counts,
            scale_state=scale_state,
            step=zero,
            averages=averages,
        )

    def train_step(self, loss_fn: LossFunction, recipe: Recipe, **options: Any) -> StepFunction:
        step_checks.check_options(options, ("weight", "monitor"), function="train_step", backend=self.name)
        weight, monitor = options.get("weight"), options.get("monitor")

        def step(state: Any, batch: Any) -> tuple[Any, StepResult]:
            with np.errstate(all="ignore"):
                parts, window = micro_batches(prepare_batch(batch, recipe), recipe.accumulate_steps)
                watch = None if monitor is None else ReferenceWatch(state.model, monitor)
                with contextlib.nullcontext() if watch is None else watch.installed():
                    loss, aux, grads = accumulate_gradients(loss_fn, state, parts, window, weight)
                (new,), (result,) = self.apply_gradients([state], [grads], "all")
                if monitor is not None and watch is not None:
                    around = (grads.values, state.model.parameters, new.model.parameters)
                    slots = update_slots(monitor, *around, state.scale_state.scale)
                    result = result._replace(
                        monitor=slots._replace(activations=watch.activations, products=watch.products)
                    )
            return new, result._replace(loss=loss, aux=aux)

        return step

    def value_and_grad(self, loss_fn: LossFunction, **options: Any) -> ValueAndGrad:
        step_checks.check_options(options, ("weight",), function="value_and_grad", backend=self.name)
        weight = options.get("weight")

        def run(states: Sequence[Any], batch: Any) -> tuple[Any, list[Gradients]]:
            with np.errstate(all="ignore"):
                loss, aux, grads = single_batch_gradients(
                    loss_fn, states, prepare_batch(batch, states[0].recipe), weight
                )
            return (loss if aux is None else (loss, aux)), grads

        return run

    def apply_gradients(
        self, states: Sequence[Any], grads: Sequence[Gradients], skip: Skip
    ) -> tuple[list[Any], list[StepResult]]:
        for state, item in zip(states, grads, strict=True):
            step_checks.check_gradients(
                [(name, value.shape) for name, value in state.model.parameters.items()],
                [(name, None if value is None else value.shape) for name, value in item.values.items()],
            )
        with np.errstate(all="ignore"):
            return update_states(states, grads, skip)

    def named_gradients(self, gradients: Gradients) -> list[tuple[str, Any]]:
        return list(gradients.values.items())

    def export_state(self, state: Any) -> dict[str, Array]:
        arrays = {f"model/{name}": value for name, value in state.model.parameters.items()}
        arrays |= {f"running/{name}": value for name, value in state.model.running.items()}
        arrays |= {f"optimizer/{name}/{slot}": v for name, group in state.slots.items() for slot, v in group.items()}
        arrays |= {f"optimizer/{name}/step": count for name, count in state.counts.items()}
        arrays |= {f"average/{role}/{name}": v for role, own in state.averages.items() for name, v in own.items()}
        arrays |= {f"loss_scale/{name}": value for name, value in state.scale_state._asdict().items()}
        return {**arrays, "step": state.step}

    def import_state(self, state: Any, arrays: Mapping[str, Array]) -> ReferenceState:
        model = state.model.with_arrays(
            {name: arrays[f"model/{name}"] for name in state.model.parameters},
            {name: arrays[f"running/{name}"] for name in state.model.running},
        )
        slots = {
            name: {slot: arrays[f"optimizer/{name}/{slot}"] for slot in group} for name, group in state.slots.items()
        }
        counts = {name: arrays[f"optimizer/{name}/step"] for name in state.counts}
        averages = {r: {name: arrays[f"average/{r}/{name}"] for name in own} for r, own in state.averages.items()}
        scale_state = LossScaleState(*(arrays[f"loss_scale/{name}"] for name in LossScaleState._fields))
        restored: ReferenceState = msgspec.structs.replace(
            state,
            model=model,
            slots=slots,
            counts=counts,
            scale_state=scale_state,
            step=arrays["step"],
            averages=averages,
        )
        return restored

    def refresh(self, state: Any, model: Any, plan: RefreshPlan) -> ReferenceState:
        if model is None:
            raise missing_model_error("a reference state holds arrays of its own")
        made = self.init(model, state.recipe)
        before, now = state.model.parameters, made.model.parameters
        given = model.parameters  # the arrays of `state.model`, unless they were replaced
        survivors = plan.surviving_parameters(
            {name: KnownParameter(id(array), array.shape) for name, array in before.items()},
            {name: KnownParameter(id(given[name]), array.shape) for name, array in now.items()},
            lambda old, new: np.array_equal(before[old], now[new]),
        )
        slots, counts = dict(made.slots), dict(made.counts)
        for name, old in survivors.items():
            slots[name] = {slot: state.slots[old].get(slot, array) for slot, array in made.slots[name].items()}
            counts[name] = state.counts[old]
        averages = {role: dict(own) for role, own in made.averages.items()}
        for name, old in survivors.items():
            if name in averages.get("model", ()) and old in state.averages["model"]:
                averages["model"][name] = state.averages["model"][old]
        kept = {"scale_state": state.scale_state, "step": state.step, "watch": state.watch}
        return msgspec.structs.replace(made, slots=slots, counts=counts, averages=averages, **kept)

    def averaged(self, state: Any) -> contextlib.AbstractContextManager[MLP]:
        return contextlib.nullcontext(self.averaged_model(state))

    def averaged_model(self, state: Any) -> MLP:
        model: MLP = state.model
        averages = state.averages or {"model": _optimizer_averages(state), "running": {}}
        return model.with_arrays(
            {n: averages["model"].get(n, v).astype(v.dtype) for n, v in model.parameters.items()},
            {n: averages["running"].get(n, v).astype(v.dtype) for n, v in model.running.items()},
        )

    @property
    def porting(self) -> Converter:
        """Converter for `polyamp.port`."""
        from polyamp.reference.converter import ReferenceConverter

        return ReferenceConverter()

    @property
    def porting_states(self) -> StateConverter:
        """Converter of training states for `polyamp.port`."""
        from polyamp.reference.converter import ReferenceStateConverter

        return ReferenceStateConverter()

    @property
    def observer(self) -> Observer:
        """Recorder of training passes for parity runs."""
        from polyamp.reference.observer import ReferenceObserver

        return ReferenceObserver()

    def describe_state(self, state: Any, arrays: Mapping[str, Array]) -> str:
        """Return metadata of a checkpoint's arrays, for other frameworks."""
        from polyamp.porting.states.checkpoint_metadata import state_metadata_json

        return state_metadata_json(state, arrays, self.porting, self.porting_states)

    def testing(self) -> Harness:
        return ReferenceHarness(self)


BACKEND: Final[Backend] = ReferenceBackend()


def update_states(
    states: Sequence[ReferenceState], grads: Sequence[Gradients], skip: Skip
) -> tuple[list[ReferenceState], list[StepResult]]:
    """Run the second half of a step (S9 to S14): measure every state's gradients, decide, commit."""
    grads = [_without_waiting(state, item) for state, item in zip(states, grads, strict=True)]
    norms = [_norm(_existing_gradients(item).values()) for item in grads]
    flags = [np.asarray(all(np.isfinite(v).all() for v in _existing_gradients(item).values())) for item in grads]
    after, results = [], []
    for state, item, norm, finite in zip(states, grads, norms, flags, strict=True):
        stats = GradStats(np.asarray(norm, np.float32), finite, item.weight)
        decision = decide(state.recipe.loss_scaler, state.scale_state, state.step, stats, flags, skip, XP)
        after.append(_commit_update(state, item, norm, decision))
        results.append(decision.result(stats))
    return after, results


def _without_waiting(state: ReferenceState, grads: Gradients) -> Gradients:
    """Return the gradients, None for parameters that do not train yet (S27)."""
    values = dict(grads.values)
    values.update({name: None for name, start in state.groups.starts.items() if state.step < start})
    return grads._replace(values=values)


def _norm(values: Iterable[Array]) -> np.float64:
    """Return the norm of gradients together, computed in float64."""
    return np.float64(np.sqrt(sum(float(np.sum(np.square(value, dtype=np.float64))) for value in values)))


def _commit_update(
    state: ReferenceState, grads: Gradients, norm: np.float64, decision: UpdateDecision
) -> ReferenceState:
    """Clip and update each parameter that has a gradient, and store the running statistics."""
    counted = {"scale_state": decision.scale_state, "step": np.asarray(decision.step, np.int32)}
    if decision.skipped:
        return msgspec.structs.replace(state, **counted)
    recipe = state.recipe
    wide: Any = np.float64 if recipe.policy.param == "float64" else np.float32  # of values applied to masters (S1)
    names = list(state.groups.numbers)
    wanted: list[Any] = [None if grads.values[name] is None else grads.values[name].astype(wide) for name in names]
    made = clip.clip_gradients(
        state.groups.clip_sets(recipe.clip), wanted, wide(norm), lambda own: wide(_norm(wanted[n] for n in own)), XP
    )
    clipped = dict(zip(names, made, strict=True))
    parameters, slots, counts = dict(state.model.parameters), dict(state.slots), dict(state.counts)
    for name in _existing_gradients(grads):
        counts[name] = np.asarray(counts[name] + 1, np.int32)
        member = state.groups.of(name)
        new, made_slots = member.spec.update(
            XP,
            parameters[name],
            clipped[name],
            state.slots[name],
            wide(member.rate(state.step, XP)),
            wide(counts[name]),
        )
        parameters[name] = np.asarray(new, parameters[name].dtype)
        # NumPy 1 makes float64 of a float32 scalar and a Python float
        slots[name] = {slot: np.asarray(made_slots[slot], array.dtype) for slot, array in state.slots[name].items()}
    model = state.model.with_arrays(parameters, grads.running)
    averages = _move_averages(state, model, wide(decision.step))
    return msgspec.structs.replace(state, model=model, slots=slots, counts=counts, averages=averages, **counted)


def _optimizer_averages(state: ReferenceState) -> dict[str, Array]:
    """Return the averages of an optimizer that has its own (S34)."""
    parameters = state.model.parameters.items()
    return {name: state.groups.of(name).spec.average(value, state.slots[name]) for name, value in parameters}


def _move_averages(state: ReferenceState, model: MLP, count: Any) -> dict[str, dict[str, Array]]:
    """Return the averages after an applied update (S34)."""
    if state.recipe.ema is None:
        return {}
    share = average_share(state.recipe.ema, count, None, XP)
    values = _wide_values(model, state.averages["model"], state.recipe)
    return {
        role: {name: np.asarray(move_average(old, values[role][name], share, XP)) for name, old in own.items()}
        for role, own in state.averages.items()
    }


def _wide_values(model: MLP, names: Iterable[str], recipe: Recipe) -> dict[str, dict[str, Array]]:
    """Return what is averaged, in the averages' dtype."""
    ema, wide = recipe.ema, np.float64 if recipe.policy.param == "float64" else np.float32
    if ema is None:
        return {}
    running = model.running if ema.statistics == "average" else {}
    return {
        "model": {name: model.parameters[name].astype(wide) for name in names},
        "running": {name: value.astype(wide) for name, value in running.items() if is_floating(value)},
    }


def _existing_gradients(grads: Gradients) -> dict[str, Array]:
    """Return the gradients that are not None."""
    return {name: value for name, value in grads.values.items() if value is not None}
