"""Protocols with which a backend lets the doctor measure its devices: `CapabilityProbe` and `HasCapabilityProbe`.

`backends/*/observe/capabilities.py` implement them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from polyamp.doctor.measurements import KnownTrap, Operation

HostArray = np.ndarray[Any, Any]


class ProbeDevice(NamedTuple):
    """A device that can be measured.

    Attributes:
        name: in the framework ("cuda:0").
        kind: "cpu", or the framework's word for a kind of accelerator.
        label: the model of an accelerator; else the name. Devices with the same label are measured once.
    """

    name: str
    kind: str
    label: str


class OperationPrograms(NamedTuple):
    """An operation on a device, ready to run: `forward(n)` runs it n times, one after the other, and returns when the
    device is done; `forward_backward(n)` also computes the gradients of all inputs."""

    forward: Callable[[int], None]
    forward_backward: Callable[[int], None]


class CapabilityProbe(Protocol):
    """What the doctor asks of a framework. Whatever a method raises is reported as the dtype's problem."""

    @property
    def tf32_switch(self) -> str:
        """The line of Python that turns TF32 on."""

    @property
    def traps(self) -> Sequence[KnownTrap]:
        """Known defects and surprises of the framework."""

    def devices(self) -> Sequence[ProbeDevice]:
        """Return the devices, the default one first."""

    def dtypes(self) -> Collection[str]:
        """Return which of the doctor's dtypes this version of the framework has."""

    def programs(self, operation: Operation, dtype: str, device: str, inputs: Sequence[HostArray]) -> OperationPrograms:
        """Return the operation on inputs of the dtype, as a training step runs it: compiled where steps are.

        Args:
            operation: a matrix product, a 3x3 convolution with zeros around the image, or attention without a mask.
            dtype: for "float32", TF32 is off; for "tf32", arrays are float32 and it is on.
            device: a device's name.
            inputs: float32. Matrix product: (m, k) and (k, n). Convolution: images (n, channels, height, width) and
                kernels (out, in, 3, 3). Attention: queries, keys and values (batch, heads, length, features).
        """

    def product(self, dtype: str, device: str, a: HostArray, b: HostArray) -> HostArray:
        """Return the matrix product of two float32 arrays in the dtype, read as float32 in the same program."""


@runtime_checkable
class HasCapabilityProbe(Protocol):
    """Protocol of a backend whose devices the doctor can measure."""

    @property
    def capability_probe(self) -> CapabilityProbe:
        """Measures its devices."""
