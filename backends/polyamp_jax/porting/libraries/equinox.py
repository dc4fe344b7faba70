"""`PortingLibrary` for equinox models, based on `equinox_traversal` and `equinox_layers`."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from polyamp.context_values import temporary_value
from polyamp.errors import PortError
from polyamp.porting.layouts.inventory import Inventory, NativeLayer
from polyamp.porting.layouts.layer_layout import Form, parameter_form
from polyamp.porting.layouts.layer_registration import qualified_name, registered_form
from polyamp_jax import compat
from polyamp_jax.arrays import shape_struct
from polyamp_jax.models.adapters.equinox import split_model, walk_modules
from polyamp_jax.models.call_hook import hook_calls
from polyamp_jax.porting.input_orders import ChainItem, function_item, input_orders, sequential_chains
from polyamp_jax.porting.jax_only import array_places
from polyamp_jax.porting.libraries.equinox_layers import attribute_lines, find_layer_spec
from polyamp_jax.porting.libraries.equinox_traversal import EquinoxLayer, EquinoxTraversal
from polyamp_jax.porting.libraries.porting_library import CallInputs, RecordCall, first_array


def inventory(model: Any, batch: CallInputs | None) -> Inventory:
    """Return the layers of a module, or of `(module, eqx.nn.State)`, with every array; the batch is not needed."""
    walk = _walk(model)
    modules = walk_modules(model[0] if isinstance(model, tuple) else model)
    chains = sequential_chains(modules, eqx.nn.Sequential, _chain_item)
    orders = input_orders(chains, "first", is_batched=False)
    return Inventory([_native_layer(part) for part in walk.parts], "equinox", left=walk.other_arrays, inputs=orders)


def arrays(model: Any) -> Mapping[str, Any]:
    """Return name of a leaf -> its array."""
    return {name: weight.array for name, weight in _walk(model).weights().items()}


def replace_arrays(model: Any, arrays: Mapping[str, Any]) -> Any:
    """Return a new model with other arrays in the leaves of these names."""
    return array_places.replace_leaves(model, _walk(model).weights(), arrays)


def inference_model(model: Any, stack: contextlib.ExitStack) -> Any:
    """Return a copy of the model in inference mode; see `PortingLibrary.inference_model`."""
    if isinstance(model, tuple):
        return eqx.nn.inference_mode(model[0]), *model[1:]
    return eqx.nn.inference_mode(model)


def run(model: Any, batch: CallInputs, record: RecordCall) -> Any:
    """Return the outputs on a batch, one sample at a time: the module is mapped over axis 0 of all its inputs.

    A module that cannot be called with one sample, because it maps its batch itself, gets the whole batch.
    """
    with contextlib.ExitStack() as stack:
        model = inference_model(model, stack)
    module, state = model if isinstance(model, tuple) else (model, None)
    drawn = _has_required_key(module)

    def one(module: Any, args: Any, kwargs: Any, key: Any) -> Any:
        keys = {"key": key} if drawn and "key" not in kwargs else {}
        if state is None:
            return module(*args, **keys, **kwargs)
        return module(*args, jax.tree.map(lambda leaf: leaf, state), **keys, **kwargs)[0]

    inputs, key = (batch.args, dict(batch.kwargs)), jax.random.key(0)
    watched = _OutputRecorder(module, record)
    if not _can_take_one_sample(functools.partial(one, module), inputs, key):
        return one(watched, *inputs, key)
    size = jax.tree.leaves(inputs)[0].shape[0]

    def sample(args: Any, kwargs: Any, key: Any, number: Any) -> Any:
        watched.sample = number
        return one(watched, args, kwargs, key)

    return jax.vmap(sample)(*inputs, jax.random.split(key, size), jnp.arange(size))


def _walk(model: Any) -> EquinoxTraversal:
    split_model(model)  # raises if it is no equinox model
    return EquinoxTraversal(model)


def _chain_item(part: Any, path: str) -> ChainItem:
    kind = type(part)
    if kind is eqx.nn.Lambda:
        return function_item(part.fn)
    if kind is eqx.nn.Identity:
        return ChainItem("elementwise")
    spec = find_layer_spec(part) if kind.__module__.startswith("equinox.") else None
    role = "unknown" if spec is None else spec.role
    return ChainItem(role, path, part, getattr(part, "num_spatial_dims", 0))


def _native_layer(part: EquinoxLayer) -> NativeLayer:
    leaves = {local: weight.inventory_leaf(part.name(local)) for local, weight in part.weights.items()}
    if part.layer is None:
        return NativeLayer(part.path, leaves, part.forms or (parameter_form(),))
    form, row, lines = registered_form(part.layer), find_layer_spec(part.layer), {}
    if form is None and row is not None:
        form = row.form(part.layer)
        form = Form(form.kind, form.rules, {**form.attributes, **part.attributes})
        lines = attribute_lines(part.layer, part.path, row)
    if form is None:
        raise AssertionError(f"{part.path!r} is no layer")
    module = f"eqx.nn.{type(part.layer).__name__}"
    if not type(part.layer).__module__.startswith("equinox."):
        module = qualified_name(type(part.layer))
    _check_names(form, leaves, part, module)
    return NativeLayer(part.path, leaves, (form,), module, lines)


def _check_names(form: Form, leaves: Iterable[str], part: EquinoxLayer, module: str) -> None:
    named = sorted(name for rule in form.rules for name in rule.native)
    if named != sorted(leaves):
        raise PortError(
            f"the form of {module} at {part.path!r} names the arrays {named}, and the layer has {sorted(leaves)}: a "
            "form names every array of its layer once."
        )


def _has_required_key(module: Any) -> bool:
    """Return whether the module requires a random key; an optional key is not passed."""
    parameters = inspect.signature(module).parameters
    return "key" in parameters and parameters["key"].default is inspect.Parameter.empty


def _can_take_one_sample(one: Callable[..., Any], inputs: Any, key: Any) -> bool:
    """Return whether the module can be called with one sample."""

    def sample(array: Any) -> Any:
        return shape_struct(jnp.shape(array)[1:], jnp.result_type(array))

    if any(jnp.ndim(array) == 0 for array in jax.tree.leaves(inputs)):
        return False
    try:
        jax.eval_shape(one, *jax.tree.map(sample, inputs), key)
    except Exception as error:  # noqa: BLE001  # a user's module may raise any error for a sample
        try:
            jax.eval_shape(one, *inputs, key)
        except Exception:  # noqa: BLE001  # it accepts neither; users expect the error for a sample
            raise error from None
        return False
    return True


class _OutputRecorder:
    """A copy of a module whose submodules report their outputs.

    Attributes:
        module: the copy.
        sample: number of the sample inside `jax.vmap`.
    """

    def __init__(self, module: Any, record: RecordCall) -> None:
        self._record, self._outermost = record, compat.trace_state()
        self.sample: Any = jnp.int32(0)
        leaves, structure = jax.tree.flatten(module)
        self.module = jax.tree.unflatten(structure, leaves)
        for path, node in walk_modules(self.module):
            if path:
                hook_calls(node, _record_call, path)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with temporary_value(_active_recorder, self):
            return self.module(*args, **kwargs)

    def report(self, path: str, output: Any, sample: Any, is_input: bool = False) -> None:
        """Record an output or an input. Under `jax.vmap` it is one of many and is recorded for all samples, as many as
        `sample` has."""
        if not isinstance(output, jax.Array):
            return
        if compat.trace_state() == self._outermost:
            self._record(path, output, is_input)
            return

        # each enclosing `jax.vmap` calls the batching rule below with all samples at once
        @jax.custom_batching.custom_vmap
        def out(value: Any, sample: Any) -> Any:
            return value

        @out.def_vmap
        def _(size: int, mapped: Any, value: Any, sample: Any) -> Any:
            self.report(path, value, sample, is_input)
            return value, mapped[0]

        out(jax.lax.stop_gradient(output), sample)


_active_recorder: ContextVar[_OutputRecorder | None] = ContextVar("polyamp_watching", default=None)


def _record_call(call: Callable[..., Any], module: Any, args: Any, kwargs: Any, path: str) -> Any:
    recorder = _active_recorder.get()
    if recorder is not None:
        recorder.report(path, first_array(args, kwargs), recorder.sample, is_input=True)
    output = call(*args, **kwargs)
    with_state = isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], eqx.nn.State)
    if recorder is not None:
        recorder.report(path, output[0] if with_state else output, recorder.sample)
    return output
