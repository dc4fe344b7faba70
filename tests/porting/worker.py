"""The process that moves layers and models in and out of one framework: `python -m tests.porting.worker NAME FOLDER`.

It reads the number of a stage per line from standard input, and answers when `FOLDER/NAME-STAGE.pickle` holds what it
found, a mapping of (what, item, library, ...) -> record:

1. Build everything, run it, export it to `FOLDER/LIBRARY/...`.
2. Load what every other library exported into models of other values, run them, export them again. Models, with the
   values of one library that all have in common: gradients and training curves (that library's own in stage 1).
3. Load what every other library exported again of one's own, and compare it with what was exported first. Models: let
   `port` compare the gradients of stages 1 and 2.

Started by `workers`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pickle
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np

import polyamp
from polyamp import porting
from polyamp.contract import registry
from polyamp.porting import model_side, port
from polyamp.porting.check import Batch
from polyamp.porting.layouts.converter import Evaluation
from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.transfer_plan import PortOptions
from tests import garbage
from tests.fixtures.port import common
from tests.porting.layers import cases
from tests.porting.libraries import LIBRARIES, NEEDS_BATCH, SHOWN, STEPS, TRAINED, curves, items

Array = np.ndarray[Any, Any]
Record = dict[str, Any]


class Item(NamedTuple):
    """A layer or a model of one library."""

    library: str
    name: str
    build: Callable[[int], Any]
    run: Callable[[Any], Array]
    native: Any

    @property
    def batch(self) -> Any:
        """What `export` is given."""
        return self.native if self.library in NEEDS_BATCH else None

    @property
    def hint(self) -> Any:
        """What `load` is given: of most layers the other side tells."""
        return self.batch if self.name.startswith("model/") or self.name in SHOWN else None

    def file(self, folder: Path, source: str | None = None) -> Path:
        """Where its export lies; `source`: of the values that came from there."""
        return folder / self.library / f"{source or 'own'}-{self.name.replace('/', '-')}.safetensors"


def item(library: str, name: str) -> Item:
    """An item by its name, "layer/dense" or "model/gpt"."""
    kind, _, short = name.partition("/")
    if kind == "layer":
        file = importlib.import_module(f"tests.porting.layers.{library}_layers")
        given = cases.inputs(short)
        return Item(library, name, lambda seed: file.BUILD[short](), lambda model: file.run(model, given), given)
    file = models_of(library)
    given = common.inputs(short)
    native = file.native(short, given)
    return Item(library, name, lambda seed: file.build(short, seed), lambda model: file.call(model, given), native)


class Worker:
    """One framework's share of the work.

    Attributes:
        found: what the current stage found.
        held: library and item -> the model that was filled last, so that the next values find others.
        exported: the same -> the canonical arrays of what was built.
        evaluated: the same -> a model with the values of `TRAINED`, and its evaluation.
        others: library -> what its worker found.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.found: dict[tuple[str, ...], Record] = {}
        self.held: dict[tuple[str, str], Any] = {}
        self.exported: dict[tuple[str, str], dict[str, Array]] = {}
        self.evaluated: dict[tuple[str, str], tuple[Any, Evaluation]] = {}
        self.others: dict[str, dict[tuple[str, ...], Record]] = {}
        own = [library for library, worker in LIBRARIES.items() if worker == name]
        self.own = {library: items(library) for library in own}

    def stage(self, number: int) -> None:
        """Do a stage, and write what it found."""
        self.found = {}
        for library, names in self.own.items():
            (self.folder / library).mkdir(exist_ok=True)
            for name in names:
                (self.first, self.second, self.third)[number - 1](library, name)
        with (self.folder / f"{self.name}-{number}.pickle").open("wb") as file:
            pickle.dump(self.found, file)

    def first(self, library: str, name: str) -> None:
        """Build, run and export."""
        with Recorded(self.found, "export", name, library) as record:
            each = item(library, name)
            model = self.held[library, name] = each.build(1)
            record["output"] = each.run(model)
            canonical = porting.export(model, each.batch)
            porting.save(canonical, each.file(self.folder))
            self.exported[library, name] = {path: np.array(array) for path, array in canonical.arrays().items()}
        if name.startswith("model/") and library == TRAINED:
            self.of_models(each, each.file(self.folder))

    def second(self, library: str, name: str) -> None:
        """Load what the others exported, run it, and export it again."""
        each = item(library, name)
        own = library, name
        for source in LIBRARIES:
            file = item_file(self.folder, source, name)
            if source == library or not file.exists():
                continue
            with Recorded(self.found, "load", name, source, library) as record:
                self.held[own], report = porting.load(
                    self.held[own], porting.open(file), batch=each.hint, rows=given_rows(name, library, source)
                )
                record["report"] = said(report)
                record["output"] = each.run(self.held[own])
                porting.save(porting.export(self.held[own], each.batch), each.file(self.folder, source))
            if each.hint is not None:
                with Recorded(self.found, "bare", name, source, library) as record:
                    model, _ = porting.load(self.held[own], porting.open(file), rows=given_rows(name, library, source))
                    record["output"] = each.run(model)
            if name.startswith("model/") and source == TRAINED:
                self.of_models(each, file)

    def of_models(self, each: Item, file: Path) -> None:
        """Gradients and curves of a model with the values that all have in common."""
        short = each.name.partition("/")[2]
        with Recorded(self.found, "gradients", each.name, each.library) as record:
            model, _ = porting.load(each.build(2), porting.open(file), batch=each.hint)
            evaluated, record["gradients"] = gradients(model, each)
            record["outputs"] = evaluated.outputs
            self.evaluated[each.library, each.name] = model, evaluated
        for policy in [policy for name, policy in curves(each.library) if name == short]:
            with Recorded(self.found, "curve", each.name, each.library, policy) as record:
                model, _ = porting.load(each.build(2), porting.open(file), batch=each.hint)
                record["losses"] = train(each.library, short, model, policy)

    def third(self, library: str, name: str) -> None:
        """Load what the others exported again, and compare it with what was exported first."""
        each = item(library, name)
        own = library, name
        for other in LIBRARIES:
            file = item_file(self.folder, other, name, library)
            if other == library or not file.exists() or own not in self.exported:
                continue
            with Recorded(self.found, "back", name, library, other) as record:
                self.held[own], report = porting.load(
                    self.held[own], porting.open(file), batch=each.hint, rows=given_rows(name, library, other)
                )
                record["report"] = said(report)
                back = porting.export(self.held[own], each.batch).arrays()
                before = self.exported[own]
                record["changed"] = sorted(before.keys() ^ back.keys()) + [
                    path
                    for path in before.keys() & back.keys()
                    if np.asarray(back[path]).tobytes() != before[path].tobytes()
                ]
                if record["changed"]:
                    record["output"] = each.run(self.held[own])
            if name.startswith("model/"):
                with Recorded(self.found, "check", name, other, library) as record:
                    record |= self.checked(each, other)

    def of_others(self, library: str) -> dict[tuple[str, ...], Record]:
        """What a library's worker found in the stage that evaluates its models."""
        if library not in self.others:
            with (self.folder / f"{LIBRARIES[library]}-{1 if library == TRAINED else 2}.pickle").open("rb") as file:
                self.others[library] = pickle.load(file)
        return self.others[library]

    def checked(self, each: Item, source: str) -> Record:
        """What `port(..., check=)` measures, with evaluations that are there already."""
        known = self.of_others(source)["gradients", each.name, source]
        file = item_file(self.folder, source, each.name, None if source == TRAINED else TRAINED)
        canonical = porting.open(file)
        played = Evaluation(known["outputs"], known["gradients"], {})
        model, evaluated = self.evaluated[each.library, each.name]
        target = model_side.make_model_side(model, each.native, "port")
        _, report = port.transfer_model(
            model_side.ModelSide(canonical.inventory(), Played(None, played), canonical),
            target._replace(converter=Played(target.converter, evaluated)),
            PortOptions(),
            Batch(each.native, each.native, outputs=np.inf, gradients=np.inf),
        )
        assert report.checked is not None
        return {"outputs": report.checked.outputs, "gradients": dict(report.checked.gradients)}


CHANNELS_FIRST: Final = ("torch", "equinox")


def given_rows(name: str, library: str, other: str) -> dict[str, Literal["channels"] | None] | None:
    """What the files of an item cannot show: that a dense layer takes flattened channels."""
    differ = (library in CHANNELS_FIRST) is not (other in CHANNELS_FIRST)
    return {"**": "channels"} if name == "layer/flatten" and differ else None


@dataclasses.dataclass(frozen=True)
class Played:
    """A converter that gives an evaluation made before."""

    converter: Any
    evaluation: Evaluation

    @property
    def in_place(self) -> bool:
        """As the converter says."""
        return bool(self.converter.in_place)

    def inventory(self, model: Any, batch: Any = None) -> Inventory:
        """Nobody asks."""
        raise NotImplementedError

    def fill(self, model: Any, leaves: Mapping[str, Any]) -> Any:
        """As the converter does."""
        return self.converter.fill(model, leaves)

    def evaluate(
        self, model: Any, batch: Any, cotangents: Callable[[Sequence[Array]], Sequence[Array]], inputs: Any = ()
    ) -> Evaluation:
        """As it was: every library used the same cotangents."""
        cotangents(self.evaluation.outputs)
        return self.evaluation


def gradients(model: Any, each: Item) -> tuple[Evaluation, dict[str, Array]]:
    """A model's evaluation, and the gradients of its parameters under their canonical names."""
    file, short = models_of(each.library), each.name.partition("/")[2]

    def cotangents(outputs: Sequence[Array]) -> list[Array]:
        """The same in every library, whatever the layout of its outputs."""
        (shape,) = (file.canonical(short, output).shape for output in outputs)
        return [file.native(short, np.random.default_rng(0).standard_normal(shape).astype(np.float32))]

    converter: Any = registry.backend_for(model).porting  # type: ignore[attr-defined]  # all three have one
    evaluated = converter.evaluate(model, each.native, cotangents)
    found: dict[str, Array] = {}
    for layer in converter.inventory(model, each.native).layers:
        form = layer.forms[0]
        for rule in form.rules:
            leaves = {name: layer.leaves[name] for name in rule.native}
            if all(leaf.tied is None and leaf.name in evaluated.gradients for leaf in leaves.values()):
                native = {name: porting.Lazy.of(evaluated.gradients[leaf.name]) for name, leaf in leaves.items()}
                arrays = dataclasses.replace(form, rules=(rule,)).arrays(native, gradients=True)
                found |= {f"{layer.path}/{name}": np.array(array) for name, array in arrays.items()}
    return evaluated, found


def train(library: str, name: str, model: Any, policy: str) -> list[float]:
    """The losses of a short training."""
    file = models_of(library)
    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.adamw(3e-4))
    state = polyamp.init(model, recipe, **file.OPTIONS)
    how = {"compile": False} if library == "keras" else {}  # op by op: a graph costs seconds
    step = polyamp.train_step(file.loss_fn, recipe, **how)
    losses = []
    for batch in common.steps(name, STEPS):
        state, result = step(state, batch)
        losses.append(float(result.loss))
    return losses


def models_of(library: str) -> Any:
    """The file of a library's fixture models."""
    return importlib.import_module(f"tests.fixtures.port.{library}_models")


def item_file(folder: Path, library: str, name: str, source: str | None = None) -> Path:
    """Where an item's export lies, without its library."""
    return Item(library, name, lambda seed: None, lambda model: model, None).file(folder, source)


def said(report: Any) -> Record:
    """What the tests ask of a report."""
    return {
        "merges": list(report.merges),
        "differences": [str(each) for each in report.differences],
        "moved": [tuple(dataclasses.astuple(each)) for each in report.moved],
    }


class Recorded:
    """Puts a record into `found`, with its seconds of processor time, and what was raised as its "error"."""

    def __init__(self, found: dict[tuple[str, ...], Record], *key: str) -> None:
        self.record: Record = found.setdefault(key, {"error": None})
        self.begun = time.process_time()

    def __enter__(self) -> Record:
        return self.record

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        self.record["seconds"] = time.process_time() - self.begun
        if isinstance(error, Exception):
            self.record["error"] = f"{kind.__name__}: {error}"
            self.record["traceback"] = "".join(traceback.format_exception(error)[-6:])
        return isinstance(error, Exception)


def main() -> None:
    """Answer stages until standard input ends."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a framework prints is no answer
    warnings.simplefilter("ignore")
    garbage.search_seldom()
    if name == "torch":
        import torch

        torch.set_num_threads(1)
    if name == "tensorflow":
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    worker = Worker(name, folder)
    for line in sys.stdin:
        start = time.process_time()
        worker.stage(int(line))
        print(json.dumps({"stage": int(line), "seconds": time.process_time() - start}), file=answers, flush=True)


if __name__ == "__main__":
    main()
