"""`Engine`: a model's parts and a policy for one pass through `loss_fn`. It runs the model and keeps its running state.

In mode "autocast" the interpreter runs the model on its master weights; in mode "cast" parameters are cast once at the
model's boundary, inputs and outputs at every call (S3). What `loss_fn` sees is `reading.BoundModel`, which asks the
engine. Called by `reading`, `differentiate` and `autocast`.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import jax

from polyamp.errors import RecipeError, TraceError, UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp.rules.plan import Plan
from polyamp_jax import compat
from polyamp_jax.arrays import cast, cast_arguments, is_array, matmul_precision, named_leaves
from polyamp_jax.models.adapt import adapt
from polyamp_jax.models.attributes import TRANSFORMED
from polyamp_jax.models.function import FunctionAdapter
from polyamp_jax.models.nnx_arguments import Taken, put_in, take_out
from polyamp_jax.models.parameter_writes import conformed, on_masters, origins, without_origins
from polyamp_jax.models.parts import Adapter, Keys, Parts, Running, module_paths
from polyamp_jax.models.passes import Pass, ValuePass
from polyamp_jax.models.routes import Route, accepts, given
from polyamp_jax.models.scopes import Casts
from polyamp_jax.precision.cast_mode import compute_params, dtype_of, module_dtypes
from polyamp_jax.precision.interpreter.recorder import Recorder
from polyamp_jax.precision.interpreter.run import evaluate
from polyamp_jax.precision.interpreter.staging import Staged, settled
from polyamp_jax.precision.interpreter.walk import interprets
from polyamp_jax.precision.regions import plan_of, region, regions

MAPPED: Final = (
    "{route} is called under jax.vmap, and it draws random numbers or has running statistics: all rows would have one "
    "dropout mask, and what the rows leave in the statistics would be lost. Call it with the whole batch, without "
    "jax.vmap; an equinox model with polyamp.init(..., axis_name='batch'), which maps it with a key for every row. Or "
    "pass the keys yourself: jax.vmap(model)(x, key=keys)."
)
"""What to say where `loss_fn` maps a call that has something to hand on."""

ENCLOSED: Final = (
    "{route} is called inside a function under policy.autocast, and it has running statistics, random streams of its "
    "own or writes to parameters, which would be lost: such a function is traced by itself. Put the policy around the "
    "model: policy.autocast(model)(x), which hands them on."
)
"""What to say where a function under a policy encloses a call that has something to hand on."""

LOST_WRITE: Final = (
    "the forward pass writes to the parameter {path!r} in its tree of parameters, and the write would be lost: in JAX "
    "such a tree is a copy that lives for one pass. What a pass writes to an nnx.Param of the model is kept, and taken "
    "back with a skipped step; of another library's model compute the new value where it is needed "
    "(w = normalize(params['w'])), or return it as aux and put it into a new state behind the step."
)
"""What to say where a pass writes to parameters that are no nnx variables."""


class Engine:
    """A model under a plan: parameters bound, running state tracked from call to call.

    Every call gets random keys of its own, folded from the step's, so that two passes through one model in one
    `loss_fn` have different dropout masks.

    Args:
        adapter: of the model's library.
        plan: the policy, resolved for the model.
        params: what the model computes with: the masters, or in mode "cast" their casts.
        running: its running state.
        keys: the keys of its random streams.
        masters: the master weights; None where they are `params`.
        recorder: hears of every operation.
        strict: an operation without a rule is an error.

    Attributes:
        adapter, plan, params, masters: as given.
        start: the running state before the pass.
        shared: outside of a step, the user's own model.
        root: of an equinox model, the bound module that `loss_fn` holds.
    """

    shared: Any = None

    def __init__(
        self,
        adapter: Adapter,
        plan: Plan,
        params: Any,
        running: Running,
        keys: Keys,
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
        self._pass = self._begin()
        self._keys = keys
        self._recorder = recorder
        self._strict = strict
        self._calls = 0
        self._made_in = compat.trace_state()
        self._around = regions()  # what stands around a step touches nothing in it
        self._plans: dict[Policy | None, Plan] = {}
        self._leaves = self._parameters()

    def _begin(self, model: Any = None) -> Pass:
        adapter: Any = self.adapter
        if adapter.mutable:
            begun: Pass = adapter.start(self.params, self.masters, self.start, model)
            return begun
        return ValuePass(adapter, self.params, self.masters, self.start)

    @property
    def running(self) -> Running:
        """The running state as the calls so far, and what `loss_fn` wrote to the model's variables, have left it.

        Raises:
            TraceError: the pass changed what a step cannot carry on, or somebody wrote to a tree of parameters, from
                where it would be lost.
        """
        self._refuse_lost_writes()
        return self._pass.running

    def view(self) -> Any:
        """What the model's attributes are read from, as the calls so far have left it."""
        return self._pass.view()

    @property
    def parameters(self) -> Any:
        """The masters, with what the pass has written to them."""
        return self._pass.masters

    def params_of(self, part: Any, route: Route) -> Any:
        """The masters of a part."""
        return self.adapter.params_of(part, route, self.parameters, self.start)

    def tree(self, part: Any, route: Route) -> Any:
        """The masters of a part as the pytree that the library's own functions look through."""
        return self.adapter.tree(part, route, self.parameters, self.start)

    def computed(self, route: Route) -> Any:
        """What a route leads to, around the parameters that the model computes with."""
        return self._pass.computed(route)

    def narrowed(self, route: Route, value: Any) -> Any:
        """A value of the module at a route, its parameters as the model computes with them (equinox)."""
        if self.params is self.masters:
            return value
        dtype = dtype_of(route.path, self.adapter, self.plan)
        return jax.tree.map(
            lambda leaf: cast(leaf, dtype, float64=self.plan.float64) if is_array(leaf) else leaf, value
        )

    def state(self) -> Any:
        """What the library calls the state of the model, as the calls so far have left it."""
        return self.adapter.state_of(self.running)

    def call(self, route: Route, args: Any, kwargs: Any, part: Any = None) -> Any:
        """The output of the model, or of the part that `route` leads to, floating leaves in the policy's output dtype.

        With a copy of an equinox module, `part`, the model has that in the module's place. A part may return numbers
        and strings beside arrays; of the model itself the interpreter refuses them.
        """
        plan = self._acting()
        keys = {name: jax.random.fold_in(key, self._calls) for name, key in self._keys.items()}
        self._calls += 1
        mapped = self._mapped(args, kwargs)
        if mapped and self._draws(route, args, kwargs):
            raise TraceError(MAPPED.format(route=route))
        args, kwargs, taken = take_out(args, kwargs)
        arrays = None if taken is None else taken.arrays
        outward = functools.partial(cast_arguments, dtype=plan.output, float64=plan.float64)
        with matmul_precision(plan), settled():
            if not plan.root.mixes or not interprets(plan):
                dtype = dtype_of(route.path, self.adapter, plan) if route.steps and plan.cast else plan.compute
                args, kwargs, arrays = cast_arguments((args, kwargs, arrays), dtype, float64=plan.float64)
            adapter: Any = self.adapter
            params, own = self._pass.inputs()
            masters, before = self._pass.masters, own
            if plan is not self.plan:
                params = compute_params(masters, adapter, plan)
            if part is not None:
                adapter, params, before = adapter.with_part(route, part, self.masters, own)
                params = compute_params(params, adapter, plan)
            run = self._autocast if interprets(plan) else self._called_once
            output, after, changed = run(plan, adapter, route, taken, params, before, keys, args, kwargs, arrays)
            written = None if after.written is None else conformed(after.written, params)
            after = after._replace(written=None)
            if part is not None:
                after = after._replace(statistics=(own.statistics[0], after.statistics[1]))
            after, moved = self._pass.moved(after, own, outward)
            moved = moved or bool(written)
            self._refuse_lost_writes()
            if part is not None and moved and self._made_in != compat.trace_state():
                raise RecipeError(TRANSFORMED)
            if mapped and moved:
                raise TraceError(MAPPED.format(route=route))
            if moved and self._made_in != compat.trace_state() and len(regions()) > len(self._around):
                raise TraceError(ENCLOSED.format(route=route))
            if not mapped:
                self._pass.take(after, route, None if written is None else on_masters(written, params, masters))
            self._check_output(route, output)
            output = outward(output)
        if taken is not None:
            taken.put_back(changed)
        return output

    def _acting(self) -> Plan:
        """The plan of a call: that of the innermost policy around it."""
        inside = regions()[len(self._around) :]
        if not inside:
            return self.plan
        policy = inside[-1]
        if policy not in self._plans:
            self._plans[policy] = plan_of(policy, self.plan, self._paths())
        return self._plans[policy]

    def under(self, policy: Policy) -> EngineUnderPolicy:
        """This engine for a model under another policy than its own.

        Raises:
            PolicyError: an override matches no module.
        """
        self._plans[policy] = policy.plan(self._paths(), backend="jax")
        return EngineUnderPolicy(self, policy)

    def _paths(self) -> frozenset[str]:
        return module_paths(Parts(self.adapter, self.masters, self.start._replace(written=None)))

    def _parameters(self) -> tuple[list[Any], Any]:
        """The arrays of the parameters and their places, to be compared later."""
        return jax.tree.flatten((self.params, self.masters))

    def _refuse_lost_writes(self) -> None:
        """Refuse what was written to a tree of parameters, as plain functions and `model.params` have them: it is this
        pass's own.

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
                    raise TraceError(LOST_WRITE.format(path=path))

    def _check_output(self, route: Route, output: Any) -> None:
        """Refuse a module of nnx that a method returns: it is no part of the model any more."""
        if not route.steps or not self.adapter.mutable:
            return
        kind = self.adapter.module
        if any(isinstance(leaf, kind) for leaf in jax.tree.leaves(output, is_leaf=lambda node: isinstance(node, kind))):
            raise UnsupportedError(
                f"{route}(...) returns a module. Called from loss_fn it would pass the policy by, and what it changes, "
                "such as running statistics, would be lost. Reach it by attributes, as in model.blocks[0](x), or call "
                "it inside of the method."
            )

    def _mapped(self, args: Any, kwargs: Any) -> bool:
        """Whether `loss_fn` calls this under a `jax.vmap` of its own."""
        if self._made_in == compat.trace_state():
            return False
        return any(map(compat.is_mapped, jax.tree.leaves((args, kwargs))))

    def _draws(self, route: Route, args: Any, kwargs: Any) -> bool:
        """Whether the call would be given random keys of the state's."""
        names = [name for name in self._keys if name not in kwargs]
        if not names or "rngs" in kwargs:
            return False
        if self.adapter.stream == "default":
            function = route.function(self.view())
            return accepts(function, "rngs") and not given(function, "rngs", args, kwargs)
        if self.adapter.stream == "key" and route.steps:
            function = route.function(self.view())
            return any(accepts(function, name) for name in names)
        return True

    def _called(
        self,
        adapter: Any,
        casts: Casts,
        route: Route,
        taken: Taken | None,
        params: Any,
        running: Running,
        keys: Keys,
        args: Any,
        kwargs: Any,
        arrays: Any,
    ) -> tuple[Any, Running, Any]:
        """The call itself: output, running state, and what it changed in nnx objects among its arguments."""
        if taken is None:
            return *adapter.call(params, running, keys, casts, route, args, kwargs), None
        objects = taken.anew(arrays)
        args, kwargs = put_in(args, kwargs, objects)
        output, running = adapter.call(params, running, keys, casts, route, args, kwargs)
        return output, running, taken.changed(objects, arrays)

    def _called_once(
        self,
        plan: Plan,
        adapter: Any,
        route: Route,
        taken: Taken | None,
        params: Any,
        running: Running,
        keys: Keys,
        args: Any,
        kwargs: Any,
        arrays: Any,
    ) -> tuple[Any, Running, Any]:
        """The call outside of the interpreter's trace. Where parameters look written, a trace of the call decides: a
        nested `nnx.jit` hands out all of them as other arrays."""
        casts = Casts(plan, module_dtypes(params, adapter, plan))

        def call(params: Any) -> tuple[Any, Running, Any]:
            return self._called(adapter, casts, route, taken, params, running, keys, args, dict(kwargs), arrays)

        output, after, changed = call(params)
        if after.written is not None:
            program = jax.make_jaxpr(lambda params: call(params)[1].written)(params)
            came = dict(zip(sorted(after.written), origins(program.jaxpr), strict=True))
            after = after._replace(written=without_origins(after.written, came, params))
        return output, after, changed

    def _autocast(
        self,
        plan: Plan,
        adapter: Any,
        route: Route,
        taken: Taken | None,
        params: Any,
        running: Running,
        keys: Keys,
        args: Any,
        kwargs: Any,
        arrays: Any,
    ) -> tuple[Any, Running, Any]:
        casts = Casts(plan, scoped=True)

        def run(params: Any, running: Running, keys: Keys, args: Any, kwargs: Any, arrays: Any) -> Any:
            return self._called(adapter, casts, route, taken, params, running, keys, args, dict(kwargs), arrays)

        programs: list[Staged] = []
        output, after, changed = evaluate(
            plan,
            run,
            (params, running, keys, args, kwargs, arrays),
            {},
            modules=None if isinstance(adapter, FunctionAdapter) else lambda: casts.paths,
            parameters=params,
            strict=self._strict,
            recorder=self._recorder,
            numbers=bool(route.steps),
            traced=programs.append,
        )
        if after.written is not None:
            _, came, _ = programs[0].result(origins(programs[0].jaxpr))
            after = after._replace(written=without_origins(after.written, came.written, params))
        return output, after, changed


class EngineUnderPolicy:
    """An engine whose calls run under another policy; for all else it is the engine."""

    def __init__(self, engine: Engine, policy: Policy) -> None:
        self._engine = engine
        self._policy = policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def under(self, policy: Policy) -> EngineUnderPolicy:
        """Itself: its policy stands inside of any other that is put around it."""
        return self

    def call(self, route: Route, args: Any, kwargs: Any, part: Any = None) -> Any:
        """The output of the model, or of a part of it."""
        with region(self._policy):
            return self._engine.call(route, args, kwargs, part)


class NativeEngine(Engine):
    """A user's own model, outside of a step: each call and each look finds it as it is then.

    What a call changes is put into an nnx module, as calling it would; the other libraries' models cannot change, so
    there it is dropped.
    """

    def __init__(self, model: Any, plan: Plan, *, recorder: Recorder | None, strict: bool) -> None:
        self.shared = model
        adapter, params, running = adapt(model)
        super().__init__(adapter, plan, params, running, {}, recorder=recorder, strict=strict)

    def view(self) -> Any:
        """The model itself, so that what is written to its variables stays; of other libraries one made of it."""
        self._look()
        return super().view()

    def call(self, route: Route, args: Any, kwargs: Any, part: Any = None) -> Any:
        self._look()
        return super().call(route, args, kwargs, part)

    def params_of(self, part: Any, route: Route) -> Any:
        self._look()
        return super().params_of(part, route)

    def computed(self, route: Route) -> Any:
        self._look()
        return super().computed(route)

    def _acting(self) -> Plan:
        """Its own: its policy was put around the model itself, which is as far inside as can be."""
        return self.plan

    def _mapped(self, args: Any, kwargs: Any) -> bool:
        """Never: the user's own loop has no streams of a state, and flax refuses what would be lost."""
        return False

    def _look(self) -> None:
        self.adapter, self.masters, self.start = adapt(self.shared)
        self.params = compute_params(self.masters, self.adapter, self.plan)
        self._pass = self._begin(self.shared if self.adapter.mutable else None)
        self._leaves = self._parameters()
