"""`Trace`: recorded run of one side, entry by entry, and its file format. A truncated file stays readable."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Final, Literal

import msgspec

from polyamp.contract.casting_report import OperationCount
from polyamp.parity.trace.sketch import Sketch

Stage = Literal["forward", "backward", "step", "update"]
"""Part of a training step: "step" has the metrics that the step itself reports (norm, flag, scale)."""
NOT_SLOTS: Final = ("parameter", "statistic", "average")
"""What an update changes besides the slots of the optimizer."""
BEFORE_ACTIVATION: Final = "output, before its activation"
"""Output of a second side's layer, before the activation of the first side's layer is applied to it."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One recorded array or number of a side.

    Attributes:
        step: number of the training step, from 1.
        stage: the part of the step.
        module: path of the module, or of the layer that owns the parameter, in the first side's names; "" for the
            model.
        what: "input", "output", "cotangent" (the gradient of the loss with respect to the output), "loss",
            "gradient", "grad_norm", "finite", "scale", "applied" (the number of applied updates), "parameter",
            "statistic", "average" (a moving average of one of the two, S34), or a slot of the optimizer ("exp_avg").
        name: the array's name in its layer in canonical layout ("kernel"); "" for a module's output and for numbers.
        sketch: of an array, in canonical layout; None for a number.
        number: a number; None for an array.
        own: the path in this side's names.
    """

    step: int
    stage: Stage
    module: str
    what: str
    name: str = ""
    sketch: Sketch | None = None
    number: float | None = None
    own: str = ""

    @property
    def array_sketch(self) -> Sketch:
        """The sketch of an entry of an array."""
        assert self.sketch is not None
        return self.sketch


entry_key: Final[Callable[[Entry], tuple[int, str, str, str, str]]] = operator.attrgetter(
    "step", "stage", "module", "what", "name"
)
"""Function from an entry to the key that matches entries of the same quantity on both sides."""


class Trace(msgspec.Struct, kw_only=True):
    """One run of one side, under one policy, without its entries.

    Attributes:
        side: the side's label.
        phase: "float32", "float64", or the policy.
        operations: operations of step 1, by module in the first side's names.
        library: whose layers the model has ("torch", "flax.nnx"); "" where it is not known.
        hidden_reason: why submodules are not visible; "" if they are.
        dropouts: calls of dropout that were turned off in the first pass; None where they cannot be counted.
        seconds: wall time of the models alone (steps and passes).
    """

    side: str
    phase: str
    operations: list[OperationCount] = msgspec.field(default_factory=list)
    library: str = ""
    hidden_reason: str = ""
    dropouts: int | None = None
    seconds: float = 0.0


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Entry)
_MAX_READ: Final = 64
"""Number of entries that are read at a time."""


class TraceWriter:
    """Append-only file of entries. Each entry is flushed when it is written.

    Args:
        path: a new file.
        on_entry: also called with each entry.
    """

    def __init__(self, path: Path, on_entry: Callable[[Entry], None] | None = None) -> None:
        self._file: IO[bytes] = path.open("wb")
        self._on_entry = on_entry

    def __call__(self, entry: Entry) -> None:
        body = _ENCODER.encode(entry)
        self._file.write(len(body).to_bytes(4, "little") + body)
        self._file.flush()
        if self._on_entry is not None:
            self._on_entry(entry)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_entries(path: Path) -> Iterator[Entry]:
    """Yield the entries of a file, up to the last complete one."""
    return itertools.chain.from_iterable(_read_groups(path))


def _read_groups(path: Path) -> Iterator[list[Entry]]:
    with path.open("rb") as file:
        found: list[Entry] = []
        while len(head := file.read(4)) == 4:
            body = file.read(int.from_bytes(head, "little"))
            if len(body) < int.from_bytes(head, "little"):
                break
            found.append(_DECODER.decode(body))
            if len(found) == _MAX_READ:
                yield found
                found = []
        yield found
