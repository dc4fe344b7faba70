"""Detection of a model's library and selection of its adapter.

Each library's adapter is in a separate file that imports that library. The file is loaded only if the user's program
has already imported the library.
"""

from __future__ import annotations

from typing import Any, Final

from polyamp.errors import ModelError, UnsupportedError
from polyamp_jax import compat
from polyamp_jax.models.function import FunctionAdapter
from polyamp_jax.models.model_parts import ModelParts, OpaqueValue, RunningState

ACCEPTED_MODELS: Final = (
    "an nnx.Module, an equinox module, (equinox module, eqx.nn.State), (linen_module, variables), "
    "(hk.Transformed, params), (hk.TransformedWithState, (params, state)) or (apply_fn, params)"
)


def is_model(target: Any) -> bool:
    """Return True for objects that `adapt` accepts or rejects with advice, and False for a plain function."""
    return isinstance(target, tuple) or any(compat.is_a(target, *kind) for kind in _MODULE_CLASSES)


def adapt(model: Any, *, axis_name: str | None = None) -> ModelParts:
    """Return a model's adapter, parameters and running state, by reference.

    Args:
        model: see `ACCEPTED_MODELS`.
        axis_name: for equinox: map the module over axis 0 of its positional arguments, under this name.

    Raises:
        ModelError: not a model, or only half of one.
        UnsupportedError: `axis_name` for another library.
    """
    first = model[0] if isinstance(model, tuple) and model else model
    if compat.is_a(first, "equinox", "Module"):
        from polyamp_jax.models.equinox import adapt_equinox

        return adapt_equinox(model, axis_name)
    if axis_name is not None:
        raise UnsupportedError(
            "axis_name= maps an equinox module over the batch; other libraries' models take whole batches. "
            f"Received: axis_name={axis_name!r} with {_describe_kind(first)}."
        )
    if compat.is_a(first, "flax.nnx", "Module") and first is model:
        from polyamp_jax.models.flax import adapt_nnx

        return adapt_nnx(model)
    if compat.is_a(first, "flax.linen", "Module"):
        from polyamp_jax.models.flax import adapt_linen

        return adapt_linen(
            *_adapt_pair(model, "(linen_module, variables): variables is what module.init(...) returned")
        )
    if any(compat.is_a(x, "haiku", name) for x in (first, model) for name in _HAIKU_CLASSES):
        from polyamp_jax.models.haiku import adapt_haiku

        return adapt_haiku(model)
    if isinstance(model, tuple) and len(model) == 2 and callable(first):
        return ModelParts(FunctionAdapter(OpaqueValue(first)), model[1], RunningState((), ()))
    raise ModelError(f"model must be {ACCEPTED_MODELS}. Received: {_describe_kind(model)}.")


def _adapt_pair(model: Any, form: str) -> Any:
    if not isinstance(model, tuple) or len(model) != 2:
        raise ModelError(f"pass the model as {form}. Received: {_describe_kind(model)}.")
    return model


def _describe_kind(value: Any) -> str:
    if type(value) is tuple:
        return f"({', '.join(_describe_kind(item) for item in value)})"
    return f"{type(value).__module__}.{type(value).__qualname__}"


_HAIKU_CLASSES: Final = ("Transformed", "TransformedWithState", "MultiTransformed", "MultiTransformedWithState")
_MODULE_CLASSES: Final = (
    ("equinox", "Module"),
    ("flax.nnx", "Module"),
    ("flax.linen", "Module"),
    *(("haiku", name) for name in _HAIKU_CLASSES),
)
