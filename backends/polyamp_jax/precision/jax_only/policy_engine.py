"""`PolicyEngine`: runs a model under a policy and tracks its running state during one pass through `loss_fn`.

In mode "autocast" the interpreter runs the model on its master weights. In mode "cast" parameters are cast once at
the model's boundary, inputs and outputs at every call (S3). `loss_fn` receives a `policy_module.PolicyModule`, which
delegates to the engine.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax

from polyamp.errors import RecipeError, TraceError, UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp_jax import compat
from polyamp_jax.arrays import cast, cast_arguments, is_array, matmul_precision, named_leaves
from polyamp_jax.models.adapter import ModelAdapter, ModelParts, module_paths
from polyamp_jax.models.call_casts import CallCasts
from polyamp_jax.models.libraries import adapt
from polyamp_jax.models.model_pass import ModelPass
from polyamp_jax.models.module_path import ModulePath
from polyamp_jax.models.module_proxy import TRANSFORMED_LOSS_ERROR
from polyamp_jax.models.nnx_arguments import ArgumentObjects, extract_objects, insert_objects
from polyamp_jax.models.parameter_writes import conform_writes, drop_unchanged_writes, output_origins, writes_on_masters
from polyamp_jax.models.running_state import ModelInputs, RandomKeys, RunningState
from polyamp_jax.precision.cast_mode import compute_params, module_dtype, module_dtypes
from polyamp_jax.precision.interpreter.casting_recorder import Recorder
from polyamp_jax.precision.interpreter.evaluation import evaluate
from polyamp_jax.precision.interpreter.interpreter import has_interpreted_operations
from polyamp_jax.precision.interpreter.tracing import FunctionTrace, innermost_policy_scope
from polyamp_jax.precision.jax_only.autocast_regions import open_regions, region_plan

MAPPED_CALL_ERROR: Final = (
    "{route} is called under jax.vmap, and it draws random numbers or has running statistics: all rows would have one "
    "dropout mask, and what the rows leave in the statistics would be lost. Call it with the whole batch, without "
    "jax.vmap; an equinox model with polyamp.init(..., axis_name='batch'), which maps it with a key for every row. Or "
    "pass the keys yourself: jax.vmap(model)(x, key=keys)."
)
"""Error message for a call with random streams or running statistics inside a `jax.vmap` of `loss_fn`."""

ENCLOSED_CALL_ERROR: Final = (
    "{route} is called inside a function under policy.autocast, and it has running statistics, random streams of its "
    "own or writes to parameters, which would be lost: such a function is traced by itself. Put the policy around the "
    "model: policy.autocast(model)(x), which hands them on."
)
"""Error message for a call that changes state inside a function under a policy."""

LOST_WRITE_ERROR: Final = (
    "the forward pass writes to the parameter {path!r} in its tree of parameters, and the write would be lost: in JAX "
    "such a tree is a copy that lives for one pass. What a pass writes to an nnx.Param of the model is kept, and taken "
    "back with a skipped step; of another library's model compute the new value where it is needed "
    "(w = normalize(params['w'])), or return it as aux and put it into a new state behind the step."
)
"""Error message for a pass that writes to parameters that are not nnx variables."""

CallResult = tuple[Any, RunningState, Any]
"""Output, running state after a call, and changed arrays of the nnx objects among the arguments, or None."""
ModelCall = Callable[[ModelInputs], CallResult]


class PolicyEngine:
    """A model under a plan, with bound parameters and a running state that is tracked from call to call.

    Every call gets its own random keys, folded from the step's, so that two passes through one model in one `loss_fn`
    have different dropout masks.

    Args:
        adapter: adapter of the model's library.
        plan: the policy, resolved for the model.
        params: the parameters that the model computes with: the masters, or in mode "cast" their casts.
        running: its running state.
        keys: the keys of its random streams.
        masters: the master weights. None if they are `params`.
        recorder: records every operation.
        strict: raise for an operation without a rule.

    Attributes:
        adapter, plan, params, masters: as passed.
        start: the running state before the pass.
        native: outside of a step, the user's own model.
        root: for an equinox model, the proxy that `loss_fn` receives.
    """

    native: Any = None
    _casts_class: type[CallCasts] = CallCasts

    def __init__(
        self,
        adapter: ModelAdapter,
        plan: ResolvedPolicy,
        params: Any,
        running: RunningState,
        keys: RandomKeys,
        *,
        masters: Any = None,
        recorder: Recorder | None = None,
        strict: bool = False,
    ) -> None:
        self.adapter = adapter
        self.plan = plan
        self.params = params
        self.masters = params if masters is None else masters
        self.root: Any = None
        self.start = running
        self._pass = adapter.start(self.params, self.masters, running)
        self._keys = keys
        self._recorder = recorder
        self._strict = strict
        self._calls = 0
        self._trace = compat.trace_state()
        self._outer_regions = open_regions()  # regions around a step do not affect it
        self._plans: dict[Policy | None, ResolvedPolicy] = {}
        self._leaves = self._parameters()

    @property
    def running(self) -> RunningState:
        """The running state after the calls so far, with `loss_fn`'s writes to the model's variables.

        Raises:
            TraceError: the pass changed something that a step cannot carry on, or wrote to a tree of parameters, where
                the write would be lost.
        """
        self._refuse_lost_writes()
        return self._pass.running

    def watch_layers(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager around `loss_fn` in which the layers of a model that cast by themselves
        (`ModelAdapter.applies_policy`) are watched; here they are not."""
        return contextlib.nullcontext()

    def view(self) -> Any:
        """Return the model from which attributes are read, after the calls so far."""
        return self._current_pass().view()

    @property
    def parameters(self) -> Any:
        """The masters, with the writes of this pass."""
        return self._current_pass().masters

    def params_of(self, part: Any, route: ModulePath) -> Any:
        """Return the masters of a part."""
        masters = self.parameters
        return self.adapter.params_of(part, route, masters, self.start)

    def tree(self, part: Any, route: ModulePath) -> Any:
        """Return the masters of a part as the pytree that the library's own functions traverse."""
        masters = self.parameters
        return self.adapter.tree(part, route, masters, self.start)

    def with_compute_dtype(self, route: ModulePath, value: Any) -> Any:
        """Return `value`, found at `route`, with the parameters that the model computes with.

        For an equinox module this is a value that the module at `route` has.
        """
        current = self._current_pass()
        if self.adapter.is_mutable:
            return current.compute_part(route)
        if self.params is self.masters:
            return value
        dtype = module_dtype(route.path, self.adapter, self.plan)
        return jax.tree.map(
            lambda leaf: cast(leaf, dtype, float64=self.plan.float64) if is_array(leaf) else leaf, value
        )

    def state(self) -> Any:
        """Return what the library calls the model's state, after the calls so far."""
        return self.adapter.state_of(self.running)

    def _current_pass(self) -> ModelPass:
        """Return the state of the pass for a read or a call."""
        return self._pass

    def call(self, route: ModulePath, args: Any, kwargs: Any, part: Any = None) -> Any:
        """Return the output of the model, or of the part at `route`, floating leaves in the policy's output dtype.

        A copy of an equinox module, `part`, replaces that module in the model. A part may also return numbers and
        strings. For the model itself the interpreter rejects them.
        """
        current, plan = self._current_pass(), self.active_plan()
        keys = {name: jax.random.fold_in(key, self._calls) for name, key in self._keys.items()}
        self._calls += 1
        mapped = self._is_mapped(args, kwargs)
        if mapped and self._draws(route, args, kwargs):
            raise TraceError(MAPPED_CALL_ERROR.format(route=route))
        args, kwargs, objects = extract_objects(args, kwargs)
        object_arrays = None if objects is None else objects.arrays
        cast_output = functools.partial(cast_arguments, dtype=plan.output, float64=plan.float64)
        interpreted = has_interpreted_operations(plan)
        with matmul_precision(plan), innermost_policy_scope():
            if not plan.root.mixes or not interpreted:
                dtype = module_dtype(route.path, self.adapter, plan) if route.steps and plan.cast else plan.compute
                args, kwargs, object_arrays = cast_arguments((args, kwargs, object_arrays), dtype, float64=plan.float64)
            adapter: Any = self.adapter
            params, own = current.inputs()
            masters, before = current.masters, own
            if plan is not self.plan:
                params = compute_params(masters, adapter, plan)
            if part is not None:
                adapter, params, before = adapter.with_part(route, part, self.masters, own)
                params = compute_params(params, adapter, plan)
            dtypes = {} if interpreted else module_dtypes(params, adapter, plan)
            casts = self._casts_class(plan, dtypes, has_scopes=interpreted)
            call = functools.partial(_call_model, adapter, casts, route, objects)
            inputs = ModelInputs(params, before, keys, args, kwargs, object_arrays)
            if interpreted:
                output, after, changed = self._interpret(call, inputs, casts, is_part=bool(route.steps))
            else:
                output, after, changed = _call_directly(call, inputs)
            written = None if after.written is None else conform_writes(after.written, params)
            after = after._replace(written=None)
            if part is not None:
                after = after._replace(statistics=(own.statistics[0], after.statistics[1]))
            after, moved = current.conform_state(after, own, cast_output)
            self._refuse_lost_writes()
            if moved or written:
                self._check_changes(route, is_copy=part is not None, mapped=mapped)
            if not mapped:
                current.advance(after, route, None if written is None else writes_on_masters(written, params, masters))
            self._check_output(route, output)
            output = cast_output(output)
        if objects is not None:
            objects.put_back(changed)
        return output

    def _check_changes(self, route: ModulePath, *, is_copy: bool, mapped: bool) -> None:
        """Reject a call that changed the running state or wrote parameters where these changes would be lost.

        Raises:
            RecipeError: the part was a copy made inside a transformation.
            TraceError: the call is inside a `jax.vmap` of `loss_fn`, or inside a function under a policy.
        """
        inside = self.is_in_other_trace()
        if is_copy and inside:
            raise RecipeError(TRANSFORMED_LOSS_ERROR)
        if mapped:
            raise TraceError(MAPPED_CALL_ERROR.format(route=route))
        if inside and len(open_regions()) > len(self._outer_regions):
            raise TraceError(ENCLOSED_CALL_ERROR.format(route=route))

    def active_plan(self) -> ResolvedPolicy:
        """Return the plan of a call: that of the innermost policy around it."""
        inside = open_regions()[len(self._outer_regions) :]
        if not inside:
            return self.plan
        policy = inside[-1]
        if policy not in self._plans:
            if self.adapter.applies_policy:  # raises if the layers cannot follow it
                self.resolve_policy(Policy(self.plan.param) if policy is None else policy)
            self._plans[policy] = region_plan(policy, self.plan, self._paths())
        return self._plans[policy]

    @property
    def open_pass(self) -> Any:
        """The pass of `loss_fn` that this engine belongs to."""
        return self._pass

    def is_in_other_trace(self) -> bool:
        """Return whether the program is inside a trace that `loss_fn` began."""
        return bool(self._trace != compat.trace_state())

    def resolve_policy(self, policy: Policy) -> None:
        """Resolve another policy for later calls under it.

        Raises:
            PolicyError: an override matches no module.
        """
        self._plans[policy] = self.adapter.resolve_policy(policy, self.masters, self.start._replace(written=None))

    def _paths(self) -> frozenset[str]:
        return module_paths(ModelParts(self.adapter, self.masters, self.start._replace(written=None)))

    def _parameters(self) -> tuple[list[Any], Any]:
        """Return the arrays of the parameters and their structure, for a later comparison."""
        return jax.tree.flatten((self.params, self.masters))

    def _refuse_lost_writes(self) -> None:
        """Reject writes to a tree of parameters (plain functions, `model.params`), which lasts for this pass only.

        Raises:
            TraceError: names the parameter.
        """
        leaves, structure = self._leaves
        now, shape = self._parameters()
        if structure == shape and all(a is b for a, b in zip(leaves, now, strict=True)):
            return
        for before, after in zip(jax.tree.unflatten(structure, leaves), (self.params, self.masters), strict=True):
            old, new = named_leaves(before), named_leaves(after)
            for path in {**old, **new}:
                if old.get(path) is not new.get(path):
                    raise TraceError(LOST_WRITE_ERROR.format(path=path))

    def _check_output(self, route: ModulePath, output: Any) -> None:
        """Reject an nnx module that a method returns, since it is no longer part of the model."""
        if not route.steps or not self.adapter.is_mutable:
            return
        kind = self.adapter.module
        if any(isinstance(leaf, kind) for leaf in jax.tree.leaves(output, is_leaf=lambda node: isinstance(node, kind))):
            raise UnsupportedError(
                f"{route}(...) returns a module. Called from loss_fn it would pass the policy by, and what it changes, "
                "such as running statistics, would be lost. Reach it by attributes, as in model.blocks[0](x), or call "
                "it inside of the method."
            )

    def _is_mapped(self, args: Any, kwargs: Any) -> bool:
        """Return whether `loss_fn` makes this call under its own `jax.vmap`."""
        if self._trace == compat.trace_state():
            return False
        return any(map(compat.is_mapped, jax.tree.leaves((args, kwargs))))

    def _draws(self, route: ModulePath, args: Any, kwargs: Any) -> bool:
        """Return whether the call would use random keys of the state."""
        names = [name for name in self._keys if name not in kwargs]
        if not names or "rngs" in kwargs:
            return False
        return self.adapter.draws(route, self.view(), names, args, kwargs)

    def _interpret(self, call: ModelCall, inputs: ModelInputs, casts: CallCasts, *, is_part: bool) -> CallResult:
        """Run the call under the interpreter."""
        params = inputs.params
        programs: list[FunctionTrace] = []
        output, after, changed = evaluate(
            casts.plan,
            lambda *traced: call(ModelInputs(*traced)),
            inputs,
            {},
            modules=(lambda: casts.paths) if self.adapter.module else None,
            parameters=params,
            strict=self._strict,
            recorder=self._recorder,
            numbers=is_part,
            traced=programs.append,
        )
        if after.written is not None:
            _, origins, _ = programs[0].result(output_origins(programs[0].jaxpr))
            after = after._replace(written=drop_unchanged_writes(after.written, origins.written, params))
        return output, after, changed


def _call_directly(call: ModelCall, inputs: ModelInputs) -> CallResult:
    """Run the call without the interpreter.

    If parameters look written, a trace of the call decides: a nested `nnx.jit` returns all of them as other arrays.
    """
    output, after, changed = call(inputs)
    if after.written is not None:
        program = jax.make_jaxpr(lambda params: call(inputs._replace(params=params))[1].written)(inputs.params)
        origins = dict(zip(sorted(after.written), output_origins(program.jaxpr), strict=True))
        after = after._replace(written=drop_unchanged_writes(after.written, origins, inputs.params))
    return output, after, changed


def _call_model(
    adapter: ModelAdapter, casts: CallCasts, route: ModulePath, objects: ArgumentObjects | None, inputs: ModelInputs
) -> CallResult:
    """Run the call. Return its output, the running state, and its changes to nnx objects among the arguments."""
    if objects is None:
        return *adapter.call(inputs, casts, route), None
    copies = objects.rebuild(inputs.objects)
    args, kwargs = insert_objects(inputs.args, inputs.kwargs, copies)
    output, running = adapter.call(inputs._replace(args=args, kwargs=kwargs), casts, route)
    return output, running, objects.changed_arrays(copies, inputs.objects)


def forward_scopes(engines: Sequence[PolicyEngine]) -> contextlib.ExitStack:
    """Return the context managers that the models' libraries need around a call of `loss_fn`, entered."""
    with contextlib.ExitStack() as stack:
        for kind in dict.fromkeys(type(engine.adapter) for engine in engines):
            stack.enter_context(kind.forward_scope([each for each in engines if type(each.adapter) is kind]))
        return stack.pop_all()


class NativePolicyEngine(PolicyEngine):
    """Engine of a user's own model outside of a step. Each call and each read uses the model's current values.

    Changes made by a call are written to an nnx module, as in a direct call. Models of other libraries cannot change,
    so there the changes are dropped.
    """

    def __init__(self, model: Any, plan: ResolvedPolicy, *, recorder: Recorder | None, strict: bool) -> None:
        self.native = model
        adapter, params, running = adapt(model)
        super().__init__(adapter, plan, params, running, {}, recorder=recorder, strict=strict)

    def _current_pass(self) -> ModelPass:
        """Begin a pass with the model's current values. Writes to the variables of an nnx model stay in it."""
        self.adapter, self.masters, self.start = adapt(self.native)
        self.params = compute_params(self.masters, self.adapter, self.plan)
        self._pass = self.adapter.start(self.params, self.masters, self.start, self.native)
        self._leaves = self._parameters()
        return self._pass

    def active_plan(self) -> ResolvedPolicy:
        """Return its own plan: the policy of the model itself is the innermost one."""
        return self.plan

    def _is_mapped(self, args: Any, kwargs: Any) -> bool:
        """Return False: the user's own loop has no state streams, and flax rejects changes that would be lost."""
        return False
