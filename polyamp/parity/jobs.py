"""What a run and its workers say to each other: a `Job` and `Train` to a worker, events from it, JSON line by line.

`run` writes jobs, `worker` does them, `processes` hears the events. `Starting`, `Started`, `Progress`, `Finished` and
`Failed` are passed on to `run(on_event=)`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from polyamp.parity.aligned import Agreed
from polyamp.parity.findings import Environment, Failure
from polyamp.parity.named import Named
from polyamp.parity.phases import Phase
from polyamp.parity.stored import Tree
from polyamp.parity.trace import Trace

Reason = Literal["missing", "error", "crashed", "killed", "timeout", "interrupted"]


class Loop(msgspec.Struct, frozen=True, kw_only=True, tag="loop"):
    """An `OwnLoop`.

    Attributes:
        begin, step: its functions.
        looked_at: recipe that its passes are looked at with, as JSON.
    """

    begin: Named
    step: Named
    looked_at: str


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is asked to do.

    Attributes:
        side: label.
        number: 0 for the first side.
        folder: for what sides tell each other, and for stored arrays.
        traces: folder for its traces.
        paths: where modules are looked for, before the interpreter's own places.
        build: makes the model.
        loss_fn: the loss; None for none.
        recipe: as JSON, or the function that makes it, or a loop of the user's; None for none.
        data: the function of a step's number, or the batches.
        inputs: inputs of the model; None for none.
        steps: training steps.
        names: as for `polyamp.port`.
        randomness: "off" or "shared".
        options: `{"init": {...}, "step": {...}}`.
    """

    side: str
    number: int
    folder: str
    traces: str
    paths: list[str]
    build: Named
    loss_fn: Named | None
    recipe: str | Named | Loop | None
    data: Named | list[Tree]
    inputs: Named | Tree | None
    steps: int
    names: dict[str, str] | None
    randomness: str
    options: dict[str, dict[str, Any]]

    @property
    def arrays(self) -> str:
        """The file of stored arrays."""
        return f"{self.folder}/data.bin"

    def answer(self, number: int) -> str:
        """The file in which a side says what it found of itself in the first."""
        return f"{self.folder}/answer-{number}"


class Train(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told once all sides are ready.

    Attributes:
        phases: to run, in order.
        others: numbers of the sides that met the first.
    """

    phases: list[Phase]
    others: list[int]


class Starting(msgspec.Struct, frozen=True, kw_only=True, tag="starting"):
    """The process of a side is about to start; the one event that no worker sends."""

    side: str


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """The first that a worker says: which polyamp, in which Python."""

    polyamp: str
    python: str


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """The model is built.

    Attributes:
        side: label.
        environment: where it runs.
        recipe: what it is trained with, as JSON; None where nothing is trained.
        optimizer: what the framework's own optimizer is called, which no JSON holds; "" for one of polyamp's.
    """

    side: str
    environment: Environment
    recipe: str | None
    optimizer: str = ""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The first side gave its weights away, or another one found itself in them."""

    side: str
    agreed: Agreed | None = None


class Given(msgspec.Struct, frozen=True, kw_only=True, tag="given"):
    """What the user's function gave as batch of a step: its digest."""

    side: str
    step: int
    digest: str


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """A step begins: `step` of `steps` in this phase. `loss` is that of the step before."""

    side: str
    phase: str
    step: int
    steps: int
    loss: float | None = None


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """A phase is done.

    Attributes:
        side: label.
        trace: without its entries, which are in a file; None of a float64 run that the side cannot do.
        note: why not, where that is worth saying.
    """

    side: str
    trace: Trace | None
    note: str = ""


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """All phases are done."""

    side: str


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The side comes to no end."""

    failure: Failure


Said = Hello | Started | Ready | Given | Progress | Ended | Finished | Failed
"""What a worker sends."""
Event = Starting | Started | Progress | Finished | Failed
"""What `on_event` is called with."""
