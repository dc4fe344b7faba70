"""`Trace`: what one side of a comparison did, entry by entry, and its file, which can be read up to where it ends.

`party` writes traces, `verdict` reads two of them side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final, Literal

import msgspec

from polyamp.contract.report import Operation
from polyamp.parity.sketch import Sketch

Stage = Literal["forward", "backward", "step", "update"]
"""A pass of a training step: "step" holds what the step itself reports (norm, flag, scale)."""
BEFORE: Final = "output, before its activation"
"""What a layer of the second side gave, where the activation of the first side's layer was applied to its output."""
STAGES: Final[tuple[Stage, ...]] = ("forward", "backward", "step", "update")


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One array, or one number, that a side made.

    Attributes:
        step: number of the training step, from 1.
        stage: the pass.
        module: path of the module, or of the layer that owns the parameter, as the first side calls it; "" of the
            model.
        what: "input", "output", "cotangent" (the gradient of the loss by the output), "loss", "gradient", "grad_norm",
            "finite", "scale", "applied" (the number of applied updates), "parameter", "statistic", or a slot of the
            optimizer ("exp_avg").
        name: the array's name in its layer in canonical layout ("kernel"); "" of a module's output and of numbers.
        sketch: of an array, in canonical layout; None of a number.
        number: a number; None of an array.
        own: the path as this side calls it.
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
    def key(self) -> tuple[int, str, str, str, str]:
        """What an entry of the other side has too, if it is of the same thing."""
        return self.step, self.stage, self.module, self.what, self.name


class Trace(msgspec.Struct, kw_only=True):
    """One run of one side, under one policy.

    Attributes:
        side: the side's label.
        phase: "float32", "float64", or the policy.
        entries: in the order in which they came to be.
        operations: what ran in step 1, by module as the first side calls it.
        unseen: why modules inside of the model are not shown; "" where they are.
        ended: why the run ended before its last step; "" if it did not.
        seconds: wall time that the models took for themselves (steps and passes).
    """

    side: str
    phase: str
    entries: list[Entry] = msgspec.field(default_factory=list)
    operations: list[Operation] = msgspec.field(default_factory=list)
    unseen: str = ""
    ended: str = ""
    seconds: float = 0.0


_ENCODER: Final = msgspec.msgpack.Encoder()
_ENTRY: Final = msgspec.msgpack.Decoder(Entry)


class Writer:
    """A file of entries that grows; each is whole in the file as soon as the next one is written.

    Args:
        path: a new file.
    """

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("wb")

    def __call__(self, entry: Entry) -> None:
        body = _ENCODER.encode(entry)
        self._file.write(len(body).to_bytes(4, "little") + body)
        self._file.flush()

    def close(self) -> None:
        """No more entries."""
        self._file.close()


def read(path: Path) -> Iterator[Entry]:
    """The entries of a file, up to where its writer came."""
    with path.open("rb") as file:
        while len(head := file.read(4)) == 4:
            body = file.read(int.from_bytes(head, "little"))
            if len(body) < int.from_bytes(head, "little"):
                return
            yield _ENTRY.decode(body)
