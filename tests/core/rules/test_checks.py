"""The checks that every backend makes in the same words, and the clip formula they share."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp.arrays import PYTHON
from polyamp.contract import registry
from polyamp.errors import BackendNotInstalledError, BatchError, CheckpointError, GradientError, LossError
from polyamp.reference import MLP
from polyamp.reference.tensor import Tensor
from polyamp.rules import batches, clip, labels, refusals
from polyamp.rules.batches import micro_batches
from polyamp.trees import map_tree


def test_an_empty_batch_cannot_be_split() -> None:
    with pytest.raises(BatchError, match="batch is empty"):
        batches.micro_batch_size([("['x']", (0, 4))], 2)


def test_numbers_and_text_go_into_every_micro_batch() -> None:
    first, second = micro_batches({"x": np.arange(4), "note": "text", "factor": 2.0, "none": None}, 2)
    assert (first["x"].tolist(), second["x"].tolist()) == ([0, 1], [2, 3])
    assert (second["note"], second["factor"], second["none"]) == ("text", 2.0, None)


def test_a_list_of_bare_arrays_is_ambiguous() -> None:
    with pytest.raises(BatchError, match="could be 2 micro-batches or one batch of 2 arrays"):
        micro_batches([np.ones(2), np.ones(2)], 2)


def test_trees_keep_their_types() -> None:
    from collections import OrderedDict, UserDict, defaultdict, namedtuple
    from dataclasses import dataclass

    @dataclass
    class Pair:
        left: int
        right: int

    class Output(OrderedDict[str, int]):
        def __init__(self, **values: int) -> None:
            super().__init__(values)

    point = namedtuple("point", "x y")  # the untyped kind is the harder one

    def doubled(tree: Any) -> Any:
        return map_tree(lambda leaf: 2 * leaf, tree)

    assert doubled(defaultdict(int, a=1)) == {"a": 2}
    assert doubled(defaultdict(int, a=1))["missing"] == 0
    assert doubled(UserDict(a=1)).data == {"a": 2}
    assert type(doubled(Output(a=1))) is Output
    assert doubled(Pair(1, 2)) == Pair(2, 4)
    assert doubled(point(1, 2)) == point(2, 4)


def test_clip_factor_is_exact_for_small_and_zero_norms() -> None:
    assert clip.factor(2e-6, 1e-6, PYTHON) == 0.5
    assert clip.factor(0.0, 1.0, PYTHON) == 1.0


def test_shapes_that_would_broadcast_and_surplus_gradients_are_refused() -> None:
    with pytest.raises(LossError, match="one shape"):
        labels.check_loss_pair(np.ones((8, 3)), np.ones((8, 1)), what="mean_squared_error")
    with pytest.raises(GradientError, match=r"not a parameter: \['b'\]"):
        refusals.check_gradients([("a", (2,))], [("a", (2,)), ("b", (2,))])


def test_a_gradient_of_none_is_an_unused_parameter_unless_there_is_nothing_else() -> None:
    parameters = [("a", (2,)), ("b", (3,))]
    refusals.check_gradients(parameters, [("a", None), ("b", (3,))])
    with pytest.raises(GradientError, match="depends on none of the model's trainable parameters"):
        refusals.check_gradients(parameters, [("a", None), ("b", None)])


def test_damage_far_into_a_large_file_is_detected(tmp_path: Path) -> None:
    def made(seed: int) -> Any:
        return polyamp.init(MLP.random([64, 64, 64], seed=seed), polyamp.Recipe())

    path = tmp_path / "big"
    polyamp.save(made(0), path)
    whole = path.read_bytes()
    for at in np.linspace(8, len(whole) - 1, 50).astype(int):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(CheckpointError):
            polyamp.restore(made(1), path)


def test_file_and_folder_are_flushed_in_that_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[bool] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        folders.append(stat.S_ISDIR(os.fstat(handle).st_mode))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    polyamp.save(polyamp.init(MLP.random([3, 2], seed=0), polyamp.Recipe()), tmp_path / "checkpoint")
    assert folders == [False, True]


def test_autocast_finds_keyword_arrays_and_missing_frameworks(monkeypatch: pytest.MonkeyPatch) -> None:
    run = polyamp.Policy(compute="bfloat16").autocast(lambda *, x: x)
    assert run(x=Tensor(np.ones(2, np.float32))).dtype == np.float32

    def missing(*objects: Any) -> Any:
        raise BackendNotInstalledError("needs tiny")

    monkeypatch.setattr(registry, "backend_for", missing)
    with pytest.raises(BackendNotInstalledError):
        polyamp.Policy("mixed_bfloat16").autocast(lambda x: x)


def test_float64_named_in_the_output_alone_is_named() -> None:
    assert polyamp.Policy(output="float64").cast_to_compute({"w": np.ones(2)})["w"].dtype == np.float32
