"""`PortingLibrary`, the protocol of a JAX library's models, and its lookup. Each library has its own module here."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.porting.layouts.inventory import Inventory
from polyamp_jax.models.libraries import require_library


class RecordCall(Protocol):
    """Callback at the calls of modules: before a call with its first array, and when it ends with its output."""

    def __call__(self, path: str, value: Any, is_input: bool = False) -> None: ...


def first_array(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the first array among the arguments of a call; None if there is none."""
    found = next((each for each in (*args, *kwargs.values()) if isinstance(each, jax.Array | np.ndarray)), None)
    return None if found is None else jnp.asarray(found)


class CallInputs(NamedTuple):
    """Arguments of a model's call.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class PortingLibrary(Protocol):
    """Protocol for one library's models. The library's module in this package has these functions."""

    def inventory(self, model: Any, batch: CallInputs | None) -> Inventory:
        """Return the layers with every array; see `polyamp.porting.layouts.converter.Converter.inventory`."""

    def arrays(self, model: Any) -> Mapping[str, Any]:
        """Return leaf name in the inventory -> its array or `jax.ShapeDtypeStruct`; a tied array once."""

    def replace_arrays(self, model: Any, arrays: Mapping[str, Any]) -> Any:
        """Return a new model of the same structure with other arrays in the leaves of these names."""

    def inference_model(self, model: Any, stack: contextlib.ExitStack) -> Any:
        """Return a model in inference mode, set by the flags that libraries and users define on modules.

        An nnx model is changed itself. linen and haiku models are in inference mode until `stack` closes.
        """

    def run(self, model: Any, batch: CallInputs, record: RecordCall) -> Any:
        """Return the outputs of a model on a batch, in inference mode and in float32; may be traced. The model is the
        converter's own copy."""


def make_call_inputs(batch: Any) -> CallInputs:
    """Return call arguments from an array, a tuple of positional arguments or a mapping of keyword arguments.

    >>> make_call_inputs((1, 2))
    CallInputs(args=(1, 2), kwargs={})
    """
    if isinstance(batch, Mapping):
        return CallInputs((), {str(name): value for name, value in batch.items()})
    return CallInputs(batch if isinstance(batch, tuple) else (batch,), {})


def find_library(model: Any) -> PortingLibrary:
    """Return the module in `libraries` that supports a model.

    Raises:
        ModelError: the object is no model, or only a part of one.
    """
    return cast("PortingLibrary", require_library(model).file_in("porting.libraries"))
