"""Protocol with which a backend lets the doctor measure products in 8 bits (S36): `Float8Probe`, `HasFloat8Probe`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from polyamp.recipe.float8 import Float8
from polyamp.recipe.policy import Policy


class ProductShape(NamedTuple):
    """Sizes of a product of an activation (rows, inputs) with a parameter of `inputs * outputs` elements."""

    rows: int
    inputs: int
    outputs: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.inputs}x{self.outputs}"


class ModelProduct(NamedTuple):
    """Products of one module and one shape that run in 8 bits.

    Attributes:
        module: path of the module.
        shape: their sizes.
        count: their number in a forward pass; the body of a loop that JAX traces once counts once.
    """

    module: str
    shape: ProductShape
    count: int  # type: ignore[assignment]  # hides tuple.count, which has no use here


class ProductPrograms(NamedTuple):
    """A product, its two gradients and all casts, ready to run: `program(n)` runs them n times and returns when the
    device is done."""

    bfloat16: Callable[[int], None]
    float8: Callable[[int], None]


class MakePrograms(Protocol):
    """Function that makes the programs of one shape."""

    def __call__(self, shape: ProductShape, float8: Float8, device: str, *, compiled: bool) -> ProductPrograms:
        """Return a product of bfloat16 activations with a float32 parameter, as a training step runs it.

        Args:
            shape: its sizes.
            float8: settings of the product in 8 bits.
            device: a device's name.
            compiled: compile the programs, where the framework also runs eager code.
        """


class ModelProducts(NamedTuple):
    """The products of a model that run in 8 bits.

    Attributes:
        device: name of the model's device.
        products: in the order of the program.
        programs: makes the programs of their shapes.
    """

    device: str
    products: Sequence[ModelProduct]
    programs: MakePrograms


class Float8Probe(Protocol):
    """What the doctor asks of a framework about products in 8 bits."""

    @property
    def always_compiles(self) -> bool:
        """Whether training steps are compiled in any case."""

    def multiplies_float8(self, device: str) -> bool:
        """Return whether a device, named as in `CapabilityProbe.devices`, multiplies 8-bit floats."""

    def products(self, target: Any, policy: Policy, *inputs: Any) -> ModelProducts:
        """Return the products of `target(*inputs)` that run in 8 bits under a policy, as `explain` lists them."""

    def programs(self, shape: ProductShape, float8: Float8, device: str, *, compiled: bool) -> ProductPrograms:
        """Return the programs of one shape (`MakePrograms`), of a model that is the framework's own."""


@runtime_checkable
class HasFloat8Probe(Protocol):
    """Protocol of a backend whose products in 8 bits the doctor can measure."""

    @property
    def float8_probe(self) -> Float8Probe:
        """Measures its products in 8 bits."""
