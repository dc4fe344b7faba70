"""`TrainingSetup` and `SetupFigures`: a set-up as the user passes it, and what a backend measured of it."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import msgspec


class TrainingSetup(NamedTuple):
    """A user's own training, as `polyamp.lint` takes it; None stands for what was not passed.

    Attributes:
        model: in its framework's form; JAX: a pytree of parameters.
        optimizer: the framework's own.
        opt_state: JAX: the state of the optax transformation.
        scaler: what scales the loss.
        loss_fn, batch: `loss_fn(model, batch)` returns the loss. Both are passed, or neither.
        step: torch: `step()` runs one step of the user's own loop.
    """

    model: Any
    optimizer: Any = None
    opt_state: Any = None
    scaler: Any = None
    loss_fn: Any = None
    batch: Any = None
    step: Any = None

    @property
    def runs(self) -> bool:
        """Whether a pass can be run."""
        return self.loss_fn is not None


class WeightFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter that the optimizer updates.

    Attributes:
        name: its path.
        dtype: in which it is stored.
        moments: dtypes of the arrays of its shape that the optimizer keeps, by name.
        with_gradient: number of elements whose gradient is not zero; None if no step was measured.
        unmoved: how many of these are the same after one step; None if no step was measured.
    """

    name: str
    dtype: str
    moments: dict[str, str] = msgspec.field(default_factory=dict)
    with_gradient: int | None = None
    unmoved: int | None = None


class SensitiveOperation(NamedTuple):
    """Operations of one kind in one module that ran in 16 bits alone.

    Attributes:
        module: path of the module, "" at the top.
        name: the framework's name of the operation.
        dtype: its dtype.
        kind: what it is a part of.
    """

    module: str
    name: str
    dtype: str
    kind: Literal["norm", "softmax"]


class StepCall(NamedTuple):
    """A call in a user's step. Attributes: what it does; the name of the function; "FILE:LINE" of the call."""

    action: Literal["clip", "unscale", "step"]
    name: str
    place: str


class SetupFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend measured of a training set-up.

    Attributes:
        backend: its name.
        weights: the parameters that are updated.
        scales: whether a scaler was passed and is on.
        scaler_name: what users of this framework take as a scaler.
        operations: sensitive operations of the forward pass that ran in 16 bits; None if no pass was run.
        dtypes: in which operations compute, sorted; None if it is not known without a pass.
        head: weights of the module that makes the logits, and their dtypes, by name; None if it is not known.
        calls: clips, unscaling and updates of the user's step in their order, while the scaler is on; None if no step
            was run.
        records_steps: whether this backend can run a user's step.
        overrides: those of a policy that was passed; None without one. The backend leaves it out.
    """

    backend: str
    weights: list[WeightFigures]
    scales: bool
    scaler_name: str
    operations: list[SensitiveOperation] | None = None
    dtypes: list[str] | None = None
    head: dict[str, str] | None = None
    calls: list[StepCall] | None = None
    records_steps: bool = False
    overrides: dict[str, str] | None = None


@runtime_checkable
class InspectsSetups(Protocol):
    """Optional protocol: a backend that measures training set-ups which do not use polyamp (`polyamp.lint`)."""

    def inspect_setup(self, setup: TrainingSetup) -> SetupFigures:
        """Measure a set-up, and leave model, optimizer, scaler and random streams as they are, bit for bit."""
