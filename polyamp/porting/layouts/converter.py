"""`Converter`: what a backend gives so that its framework's models can be moved (`Ports`), and what passes between.

`port`, `check` and `files` call it; `backends/*/porting` implement it, and `polyamp.reference.porting`, which is the
shortest example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.layouts.lazy import Lazy

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


class Evaluation(NamedTuple):
    """One pass of a model, forward and backward, in float32 and as in inference (no dropout, running statistics used).

    Attributes:
        outputs: the model's outputs, its tree flattened in a fixed order (dicts by key), in the framework's own layout.
        gradients: name of a trainable leaf -> the gradient of the sum of outputs times cotangents, in the leaf's shape.
        modules: path of a module -> its output if that is one array; in the order in which calls ended.
    """

    outputs: Sequence[Array]
    gradients: Mapping[str, Array]
    modules: Mapping[str, Array]


class Converter(Protocol):
    """What `polyamp.port` asks of a framework."""

    @property
    def in_place(self) -> bool:
        """Whether `fill` gives the model itself back, with other values in it."""

    def inventory(self, model: Any, batch: Any = None) -> Inventory:
        """Every array of a model, in layers. Changes nothing, and reads no values.

        Args:
            model: as `polyamp.init` takes it; in JAX its arrays may be `jax.ShapeDtypeStruct`.
            batch: inputs to look at the model with, where a call shows more than the arrays (linen, haiku); it is
                called for shapes alone if the framework can.

        Raises:
            ModelError: no model, or one that has no variables yet.
        """

    def fill(self, model: Any, leaves: Mapping[str, Lazy]) -> Any:
        """The model with other values in the leaves of these names, which have their shapes and dtypes already.

        All of them or none: whatever cannot be read is read before the first is written, or what was written is put
        back. Arrays are read one at a time.

        Returns:
            The model itself where it is filled in place; a new one in JAX, of the same structure and sharding.
        """

    def evaluate(self, model: Any, batch: Any, cotangents: Callable[[Sequence[Array]], Sequence[Array]]) -> Evaluation:
        """Outputs, gradients and the outputs of modules, on a batch. The model is as before when it returns.

        Args:
            model: the model.
            batch: an array, a tuple of positional arguments or a mapping of keyword arguments, NumPy.
            cotangents: called with the outputs, gives what the gradient is taken with, in their shapes.
        """


@runtime_checkable
class ReadsFiles(Protocol):
    """A converter that also knows the files in which its framework keeps models. `formats` calls it, with files whose
    suffix or first bytes are its framework's (torch: .pt, .pth, .bin, and safetensors with torch's names; TensorFlow:
    .keras, .weights.h5; JAX: folders of orbax, and safetensors with flax's names)."""

    def open_file(self, path: Path) -> Inventory:
        """The layers of a file, as `inventory` lists a model's. Reads no values that it can leave, and runs no code
        that is in the file.

        Raises:
            PortError: the file is damaged, or holds no model of this framework.
            FileNotFoundError: there is no such file.
        """

    def write_file(self, path: Path, leaves: Mapping[str, Lazy], like: Path) -> None:
        """Write a file of the layout of another one, atomically, one array at a time.

        Args:
            path: the file to be written; it may be `like` itself.
            leaves: name of each leaf that `open_file(like)` lists -> its values, in that leaf's shape; dtypes may be
                others, and are those of the new file.
            like: an existing file of the target model. What is in it beside the leaves is kept.

        Raises:
            PortError: the values do not fit.
            OSError: the file cannot be written; an older one is as it was.
        """

    def write_model(self, path: Path, model: Any) -> None:
        """Write a model to a file of its framework's own form, as the path's suffix says, atomically.

        Raises:
            PortError: the framework has no file of that suffix.
            OSError: the file cannot be written; an older one is as it was.
        """


@runtime_checkable
class Ports(Protocol):
    """A backend whose models can be moved to other frameworks, and others' to it."""

    @property
    def porting(self) -> Converter:
        """What does it."""
