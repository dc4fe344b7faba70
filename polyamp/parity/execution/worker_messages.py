"""Messages between a run and its workers, as JSON lines: `SideJob` and `TrainCommand` to a worker, events from it.

`SideLaunchEvent`, `SideBuildEvent`, `SideProgressEvent`, `SideFinishEvent` and `SideFailureEvent` are passed on to
`run(on_event=)`.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from polyamp.parity.execution.function_ref import FunctionRef
from polyamp.parity.execution.memory_mapped_arrays import BatchTree
from polyamp.parity.precisions import Phase
from polyamp.parity.report_data import Environment, Failure
from polyamp.parity.trace.operation_log import PassLocation
from polyamp.parity.trace.trace import Trace
from polyamp.parity.verdict.alignment import Alignment

OPERATIONS_FILE: Final = "operations"
"""Name of the file of recorded operations in a side's folder."""
FailureReason = Literal["missing", "error", "crashed", "killed", "timeout", "interrupted"]


class OwnLoopSpec(msgspec.Struct, frozen=True, kw_only=True, tag="loop"):
    """Serialised form of an `OwnLoop`.

    Attributes:
        begin, step: its functions.
        recipe: recipe with which its passes are recorded, as JSON.
    """

    begin: FunctionRef
    step: FunctionRef
    recipe: str


class OperationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request for the operations of one pass of the first batch, in the initial state.

    Attributes:
        phase: the precision of the pass.
        locations: label -> the value at which the sides differ.
    """

    phase: Phase
    locations: dict[str, PassLocation]


class WorkerJob(msgspec.Struct, frozen=True, kw_only=True):
    """Job of a worker, with the label of its side. Subclasses add what it does."""

    side: str


class SideJob(WorkerJob, frozen=True, kw_only=True):
    """Job of a worker that takes part in a comparison.

    Attributes:
        number: 0 for the first side.
        folder: for files that sides exchange, and for stored arrays.
        traces: folder for its traces, or for the operations that it records.
        paths: folders for module lookup, before the interpreter's own.
        build: function that makes the model.
        loss_fn: the loss; None for none.
        recipe: as JSON, or the function that makes it, or a user's loop; None for none.
        data: the function of a step's number, or the batches.
        inputs: inputs of the model; None for none.
        steps: training steps.
        names: as for `polyamp.port`.
        rows: as for `polyamp.port`.
        randomness: "off" or "shared".
        options: `{"init": {...}, "step": {...}}`.
        operations: what to record instead of a training; None trains.
    """

    number: int
    folder: str
    traces: str
    paths: list[str]
    build: FunctionRef
    loss_fn: FunctionRef | None
    recipe: str | FunctionRef | OwnLoopSpec | None
    data: FunctionRef | list[BatchTree]
    inputs: FunctionRef | BatchTree | None
    steps: int
    names: dict[str, str] | None
    rows: dict[str, Literal["channels"] | None] | None
    randomness: str
    options: dict[str, dict[str, Any]]
    operations: OperationRequest | None = None

    @property
    def arrays(self) -> str:
        """Path of the file of stored arrays."""
        return f"{self.folder}/data.bin"

    def alignment_file(self, number: int) -> str:
        """Return the path of the file with a side's alignment with the first side."""
        return f"{self.folder}/answer-{number}"

    @property
    def operations_file(self) -> str:
        """Path of the file with the operations that were recorded."""
        return f"{self.traces}/{OPERATIONS_FILE}"


class TrainCommand(msgspec.Struct, frozen=True, kw_only=True):
    """Command to train, sent once all sides are ready.

    Attributes:
        phases: phases to run, in order.
        others: numbers of the sides that are aligned with the first.
    """

    phases: list[Phase]
    others: list[int]


class SideLaunchEvent(msgspec.Struct, frozen=True, kw_only=True, tag="starting"):
    """The process of a side is about to start. The only event that the worker does not send."""

    side: str


class HandshakeEvent(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """First message of a worker: its versions of polyamp and Python."""

    polyamp: str
    python: str


class SideBuildEvent(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """The model is built.

    Attributes:
        side: label.
        environment: environment in which it runs.
        recipe: its recipe as JSON; None if nothing is trained.
        optimizer: name of a framework's own optimizer, which cannot be serialised; "" for one of polyamp's.
        records_operations: whether its backend records single operations.
    """

    side: str
    environment: Environment
    recipe: str | None
    optimizer: str = ""
    records_operations: bool = False


class SideReadyEvent(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The first side has written its weights, or another side has aligned itself with them."""

    side: str
    alignment: Alignment | None = None


class BatchDigestEvent(msgspec.Struct, frozen=True, kw_only=True, tag="given"):
    """Digest of the batch that the user's function returned for a step."""

    side: str
    step: int
    digest: str


class SideProgressEvent(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Progress of a phase.

    Attributes:
        side: label.
        phase: the phase.
        step: the step that begins, of `steps`; in the demo the one that has ended.
        loss: the last known loss.
        scale: loss scale, if known.
        skipped: number of skipped steps so far, if known.
    """

    side: str
    phase: str
    step: int
    steps: int
    loss: float | None = None
    scale: float | None = None
    skipped: int = 0


class PhaseEndEvent(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """A phase has ended.

    Attributes:
        side: label.
        trace: without its entries, which are in a file; None if the side does not support float64.
        note: the reason for that, if it is worth reporting.
    """

    side: str
    trace: Trace | None
    note: str = ""


class SideFinishEvent(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """All phases have ended."""

    side: str


class SideFailureEvent(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The side has failed."""

    failure: Failure


InternalMessage = HandshakeEvent | SideReadyEvent | BatchDigestEvent | PhaseEndEvent
"""Messages for the pool of workers alone."""
ParityEvent = SideLaunchEvent | SideBuildEvent | SideProgressEvent | SideFinishEvent | SideFailureEvent
"""Events passed to `on_event`."""
WorkerMessage = InternalMessage | ParityEvent
"""Messages that a worker sends."""
