"""`PortingLibrary` for haiku models: `(hk.Transformed, params)` and `(hk.TransformedWithState, (params, state))`.

Their arrays are mappings of names. With a batch, a recorded call finds the modules of these names. Without a batch,
a layer's possible forms are inferred from names and shapes (`haiku_layer_inference`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import haiku as hk
import jax

from polyamp.errors import ModelError, PortError
from polyamp.porting.layouts.inventory import Inventory, NativeLayer
from polyamp.porting.layouts.layer_layout import Form
from polyamp.porting.layouts.layer_registration import qualified_name, registered_form
from polyamp_jax.models import library_compat
from polyamp_jax.models.adapters.haiku import split_model, takes_rng
from polyamp_jax.porting.jax_only import array_places
from polyamp_jax.porting.jax_only.array_places import LARGE_COUNT, ArrayPlace, Weight
from polyamp_jax.porting.jax_only.inference_flags import INFERENCE_FLAGS, set_inference_arguments
from polyamp_jax.porting.layers.refusal import RefusedError
from polyamp_jax.porting.libraries.haiku_layer_inference import composite_forms, forms_by_name, parameter_forms
from polyamp_jax.porting.libraries.haiku_layer_spec import HaikuCall, Shapes
from polyamp_jax.porting.libraries.haiku_layers import ATTRIBUTE_WORDS, find_layer_spec
from polyamp_jax.porting.libraries.porting_library import CallInputs, RecordCall, first_array

_SIGNATURE_ERRORS: Final = ("unexpected keyword argument", "multiple values for", "required positional argument")
"""Parts of Python's error messages for an unknown argument, a repeated one, or a missing other one."""
_COUNTER_REASON: Final = (
    "counts the batches behind a moving average; a port sets it so that nothing is corrected any more"
)
_HIDDEN_REASON: Final = "the moving average before it is corrected for its start; a port gives it the same values"


def inventory(model: Any, batch: CallInputs | None) -> Inventory:
    """Return the layers; see `PortingLibrary.inventory`."""
    found = _HaikuArrays(model)
    calls = {} if batch is None else _record_calls(model, batch)
    layers = list(found.layers(calls))
    if calls:
        order = {path: number for number, path in enumerate(calls)}
        with_arrays = {layer.path for layer in layers}
        layers += [
            layer for path, each in calls.items() if path not in with_arrays for layer in _arrayless_layers(path, each)
        ]
        layers.sort(key=lambda layer: order.get(_owner_module(layer.path, order), len(order)))
    return Inventory(layers, "haiku", bool(calls), found.other_arrays)


def arrays(model: Any) -> Mapping[str, Any]:
    """Return the arrays by name; see `PortingLibrary.arrays`."""
    return {name: weight.array for name, weight in _HaikuArrays(model).weights().items()}


def replace_arrays(model: Any, arrays: Mapping[str, Any]) -> Any:
    """Return a new model with other arrays; see `PortingLibrary.replace_arrays`."""
    return array_places.replace_leaves(model, _HaikuArrays(model).weights(), arrays)


def inference_model(model: Any, stack: contextlib.ExitStack) -> Any:
    """Return the model in inference mode, until `stack` closes; unchanged if it has several functions."""
    apply = model[0].apply
    if not callable(apply):
        return model
    stateful = isinstance(model[0], hk.TransformedWithState)
    first = 1 + stateful + takes_rng(apply, stateful)

    @functools.wraps(apply)
    def call(*args: Any, **kwargs: Any) -> Any:
        return apply(*args, **{**_inference_flags(apply, args[:first], CallInputs(args[first:], kwargs)), **kwargs})

    stack.enter_context(hk.intercept_methods(_call_in_inference))
    return model[0]._replace(apply=call), *model[1:]


def run(model: Any, batch: CallInputs, record: RecordCall) -> Any:
    """Return the outputs of a model on a batch in inference mode."""

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        is_call = context.method_name == "__call__"
        if is_call:
            record(context.module.module_name, first_array(args, kwargs), is_input=True)
        output = _call_in_inference(call, args, kwargs, context)
        if is_call:
            record(context.module.module_name, output)
        return output

    return _call_with_interceptor(model, batch, intercept)


class _HaikuArrays:
    """The arrays of a model, by module.

    Attributes:
        modules: module -> its weights by name; the averages of a batch norm are "mean" and "variance".
        other_arrays: name of an array that is no weight -> why.
    """

    def __init__(self, model: Any) -> None:
        split_model(model)  # raises if it is no haiku model
        tree = array_places.number_leaves(model)
        held = tree[1:] if len(tree) == 3 else tree[1]
        params, state = held if isinstance(held, tuple) else (held, {})
        self.modules: dict[str, dict[str, tuple[str, Weight]]] = {}
        self.other_arrays: dict[str, str] = {}
        for module, leaves in params.items():
            for leaf, place in leaves.items():
                self._add(module, leaf, f"{module}/{leaf}", Weight(place))
        for module, leaves in state.items():
            self._state(module, leaves, params)

    def _add(self, module: str, leaf: str, name: str, weight: Weight) -> None:
        if weight.place.is_weight:
            self.modules.setdefault(module, {})[leaf] = (name, weight)
        else:
            self.other_arrays[name] = "no floating numbers"

    def _state(self, module: str, leaves: Mapping[str, ArrayPlace], params: Mapping[str, Any]) -> None:
        if "u0" in leaves:
            raise PortError(
                f"{module!r} is a hk.SpectralNorm, which divides weights by a number that it learns from the batches; "
                "no other framework has it in the same way. Port the model without it, and with the weights that it "
                "makes."
            )
        left, average = dict(leaves), leaves.get("average")
        if average is not None and {"hidden", "counter"} <= set(leaves):
            hidden, counter = left.pop("hidden"), left.pop("counter")
            self.other_arrays |= {f"{module}/hidden": _HIDDEN_REASON, f"{module}/counter": _COUNTER_REASON}
            weight = Weight(left.pop("average"), False, copies=(hidden.number,), counters={counter.number: LARGE_COUNT})
            owner, _, last = module.rpartition("/~/")
            role = {"mean_ema": "mean", "var_ema": "variance"}.get(last)
            if owner and role:
                self._add(owner, role, f"{module}/average", weight)
            else:
                self._add(module, "average", f"{module}/average", weight)
        for leaf, place in left.items():
            self._add(module, leaf, f"{module}/{leaf}", Weight(place, trainable=False))

    def weights(self) -> dict[str, Weight]:
        """Return name -> weight."""
        return {name: weight for _, arrays in self._unstacked() for name, weight in arrays.values()}

    def _unstacked(self) -> Iterator[tuple[str, dict[str, tuple[str, Weight]]]]:
        """Yield the modules, one for each layer of a stack."""
        for module, arrays in self.modules.items():
            segments = module.split("/")
            stacks = [number for number, segment in enumerate(segments) if library_compat.is_layer_stack_name(segment)]
            lengths = {weight.place.shape[:1] for _, weight in arrays.values()}
            if not stacks or len(lengths) != 1 or lengths == {()}:
                yield module, arrays
                continue
            for index in range(lengths.pop()[0]):
                at = stacks[0] + 1
                path = "/".join([*segments[:at], str(index), *segments[at:]])
                yield (
                    path,
                    {leaf: (f"{path}/{leaf}", _slice_weight(weight, index)) for leaf, (_, weight) in arrays.items()},
                )

    def layers(self, calls: Mapping[str, HaikuCall]) -> Iterator[NativeLayer]:
        """Yield the layers. Modules that form one layer are joined."""
        modules = dict(self._unstacked())
        while modules:
            module = next(iter(modules))
            parent = module.rpartition("/")[0]
            together = [path for path in modules if path.rpartition("/")[0] == parent] if parent else []
            whole = composite_forms(
                parent, calls.get(parent), {path.rpartition("/")[2]: _array_shapes(modules[path]) for path in together}
            )
            if whole is None or not together:
                yield from _module_layers(module, modules.pop(module), calls.get(module))
                continue
            joined = {
                f"{path.rpartition('/')[2]}/{leaf}" if len(together) > 1 else leaf: array
                for path in together
                for leaf, array in modules.pop(path).items()
            }
            yield _native_layer(parent, joined, whole(_array_shapes(joined)), calls.get(parent))


def _slice_weight(weight: Weight, index: int) -> Weight:
    return Weight(weight.place.slice_at(index), weight.trainable, None, weight.copies, weight.counters)


def _array_shapes(arrays: Mapping[str, tuple[str, Weight]]) -> dict[str, tuple[int, ...]]:
    return {leaf: weight.place.shape for leaf, (_, weight) in arrays.items()}


def _module_layers(path: str, arrays: dict[str, tuple[str, Weight]], call: HaikuCall | None) -> Iterator[NativeLayer]:
    """Yield the layer of a module, and the parameters of no layer."""
    shapes = _array_shapes(arrays)
    found = _registered_forms(call, arrays)
    if found is None:
        try:
            found = _module_forms(path, shapes, call)
        except RefusedError as error:
            raise PortError(f"{_class_name(call)} at {path!r} cannot be moved: {error}.") from None
    named = {name for form in found[:1] for rule in form.rules for name in rule.native}
    if found:
        yield _native_layer(path, {leaf: array for leaf, array in arrays.items() if leaf in named}, found, call)
    for leaf, array in arrays.items():
        if leaf not in named:
            yield _native_layer(f"{path}/{leaf}", {"value": array}, parameter_forms(leaf, shapes[leaf]), None)


def _module_forms(path: str, shapes: Shapes, call: HaikuCall | None) -> tuple[Form, ...]:
    """Return the form of one of haiku's modules; for a custom module the possible forms by name."""
    spec = None if call is None else find_layer_spec(call.module)
    return forms_by_name(path, shapes) if spec is None or not spec.arrays else (spec.form(shapes, call),)


def _registered_forms(call: HaikuCall | None, arrays: Mapping[str, Any]) -> tuple[Form, ...] | None:
    form = None if call is None else registered_form(call.module)
    if form is None:
        return None
    named = sorted(name for rule in form.rules for name in rule.native)
    if named != sorted(arrays):
        raise PortError(f"the form of {_class_name(call)} names the arrays {named}, and it has {sorted(arrays)}.")
    return (form,)


def _native_layer(
    path: str, arrays: Mapping[str, tuple[str, Weight]], found: tuple[Form, ...], call: HaikuCall | None
) -> NativeLayer:
    leaves = {leaf: weight.inventory_leaf(name) for leaf, (name, weight) in arrays.items()}
    kind = _class_name(call)

    def line(word: str) -> Callable[[Any], str]:
        return lambda value: f"{kind}(..., {word}={value!r})  # at {path}"

    words = (
        {} if call is None else {name: word for name, word in ATTRIBUTE_WORDS.items() if name in found[0].attributes}
    )
    return NativeLayer(path, leaves, found, kind, {name: line(word) for name, word in words.items()})


def _arrayless_layers(path: str, call: HaikuCall) -> Iterator[NativeLayer]:
    """Yield the layer of a module without arrays, if its attributes are compared."""
    spec = find_layer_spec(call.module)
    if spec is not None and spec.is_arrayless:
        yield _native_layer(path, {}, (spec.form({}, call),), call)


def _class_name(call: HaikuCall | None) -> str:
    if call is None:
        return ""
    kind = type(call.module)
    return f"hk.{kind.__name__}" if kind.__module__.startswith("haiku.") else qualified_name(kind)


def _owner_module(path: str, known: Mapping[str, int]) -> str:
    """Return the module that a path names or is inside."""
    while path and path not in known:
        path = path.rpartition("/")[0]
    return path


def _record_calls(model: Any, batch: CallInputs) -> dict[str, HaikuCall]:
    """Return path of a module -> its recorded call, in the order in which the calls began."""
    found: dict[str, HaikuCall] = {}

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name == "__init__":  # it has no name yet
            return call(*args, **kwargs)
        path = context.module.module_name
        if path not in found or not found[path].inputs:
            given = args if context.method_name == "__call__" else ()
            shapes = [tuple(leaf.shape) for leaf in jax.tree.leaves((given, kwargs)) if hasattr(leaf, "shape")]
            found[path] = HaikuCall(context.module, shapes[0] if shapes else ())
        return call(*args, **kwargs)

    jax.eval_shape(lambda arrays: _call_with_interceptor((model[0], *arrays), batch, intercept), model[1:])
    return found


def _call_in_inference(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    if context.method_name == "__call__":
        args, kwargs = set_inference_arguments(context.orig_method, args, kwargs, add=False)
    return call(*args, **kwargs)


def _call_with_interceptor(model: Any, batch: CallInputs, intercept: Callable[..., Any]) -> Any:
    """Return the outputs of a model, with an interceptor around its modules.

    Raises:
        ModelError: it has several functions, and none of them is the model's own.
    """
    transformed, arrays = model[0], model[1:] if len(model) == 3 else model[1]
    apply = transformed.apply
    if not callable(apply):
        raise ModelError(
            "a model made by hk.multi_transform has several functions: make one of it with hk.transform to call it."
        )
    stateful = isinstance(arrays, tuple)
    first = (*(arrays if stateful else (arrays,)), *((jax.random.key(0),) if takes_rng(apply, stateful) else ()))

    flags = _inference_flags(apply, first, batch)
    with hk.intercept_methods(intercept):
        outputs = apply(*first, *batch.args, **{**flags, **batch.kwargs})
    return outputs[0] if stateful else outputs


def _inference_flags(apply: Callable[..., Any], arrays: Any, batch: CallInputs) -> dict[str, bool]:
    """Return the inference flags that the function accepts. haiku hides the signature, so trial calls find them."""
    taken: dict[str, bool] = {}
    for name, value in INFERENCE_FLAGS.items():
        if name not in batch.kwargs:
            kwargs = {**batch.kwargs, name: value}
            try:
                jax.eval_shape(functools.partial(apply, **kwargs), *arrays, *batch.args)
            except TypeError as error:
                if not any(words in str(error) for words in _SIGNATURE_ERRORS):
                    raise
            else:
                taken[name] = value
    return taken
