"""Rule S22: save, restore in a new process, continue: bit-identical to not stopping."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp.conformance import resume_process
from polyamp.conformance.problems import (
    advance,
    batch,
    changed_arrays,
    flat_weights,
    is_on_cpu,
    layers,
    loss_fn,
    recipe,
    stateful_recipe,
    to_float,
)
from polyamp.conformance.subjects import Subject
from polyamp.contract.backend import Backend
from polyamp.contract.harness import Harness
from polyamp.errors import CheckpointError, UnsupportedError

Arrays = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def runs(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Arrays, Arrays]]:
    """Return the arrays of each kind of model after training straight on, and after resuming in a new process."""
    folder = tmp_path_factory.mktemp("resume")
    straight, backend = {}, subject.backend
    for kind in resume_process.KINDS:
        state = resume_process.advance_state(resume_process.fresh_state(subject.harness, kind, seed=0), 0, 6)
        polyamp.save(state, folder / f"{kind}.safetensors")
        straight[kind] = backend.export_state(resume_process.advance_state(state, 6, 12))
    subprocess.run([sys.executable, "-m", resume_process.__name__, subject.name, str(folder)], check=True, timeout=300)
    return {kind: (straight[kind], dict(np.load(folder / f"{kind}.npz"))) for kind in resume_process.KINDS}


@pytest.mark.parametrize("kind", resume_process.KINDS)
def test_s22_resume_is_bit_identical(runs: dict[str, tuple[Arrays, Arrays]], kind: str) -> None:
    straight, resumed = runs[kind]
    assert set(resumed) == set(straight)
    different = [name for name in straight if straight[name].tobytes() != resumed[name].tobytes()]
    assert different == []


def test_s22_a_checkpoint_of_another_model_is_refused(backend: Backend, harness: Harness, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    polyamp.save(polyamp.init(harness.mlp(layers((4, 5, 3))), recipe()), path)
    state = polyamp.init(harness.mlp(layers()), recipe())
    before = backend.export_state(state)
    with pytest.raises(CheckpointError, match="belongs to another model"):
        polyamp.restore(state, path)
    deeper = polyamp.init(harness.mlp(layers((4, 5, 5, 3))), recipe())
    with pytest.raises(CheckpointError, match="missing: "):
        polyamp.restore(deeper, path)
    assert changed_arrays(before, backend.export_state(state)) == []


def test_s22_a_damaged_checkpoint_changes_nothing(backend: Backend, harness: Harness, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    polyamp.save(polyamp.init(harness.mlp(layers(seed=1)), recipe()), path)
    content = path.read_bytes()
    state = polyamp.init(harness.mlp(layers()), recipe())
    before = backend.export_state(state)
    flipped = bytearray(content)
    flipped[-5] ^= 1
    for damaged in (bytes(flipped), content[:-7], content[: len(content) // 2], content[:4], b""):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="damaged"):
            polyamp.restore(state, path)
        assert changed_arrays(before, backend.export_state(state)) == []


def state_bytes(backend: Backend, state: Any) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Everything in a state, random-number streams included, to the bit."""
    arrays = backend.export_state(state)
    return {name: (str(array.dtype), array.shape, array.tobytes()) for name, array in arrays.items()}


class ForgedState:
    """Arrays of anybody's making, which `save` writes with a digest that is right."""

    def __init__(self, state: Any, arrays: dict[str, Any]) -> None:
        self.backend = self
        self.name, self.recipe, self.arrays = state.backend.name, state.recipe, arrays

    def export_state(self, _: Any) -> dict[str, Any]:
        return self.arrays


def _set_value(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(arrays: dict[str, Any]) -> None:
        arrays[name] = np.asarray(value, arrays[name].dtype)

    return change


def _widen_count(name: str) -> Callable[[dict[str, Any]], None]:
    """A count that int32 does not hold, which a cast would make negative."""

    def change(arrays: dict[str, Any]) -> None:
        arrays[name] = np.asarray(2**31 + 5, np.int64)

    return change


def _last_parameter(arrays: dict[str, Any]) -> str:
    return max(name for name in arrays if name.startswith("model/"))


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "nan": (_set_value("loss_scale/scale", np.nan), "loss_scale/scale is nan, which its scaler .* never has"),
    "negative scale": (_set_value("loss_scale/scale", -8.0), "loss_scale/scale is -8"),
    "above": (_set_value("loss_scale/scale", 2.0**60), r"loss_scale/scale is 1.15.*e\+18"),
    "good_steps": (
        _set_value("loss_scale/good_steps", -7),
        "loss_scale/good_steps is -7, and a count is never negative",
    ),
    "skipped": (_set_value("loss_scale/skipped", -1), "loss_scale/skipped is -1, and a count"),
    "stuck": (_set_value("loss_scale/stuck", -1), "loss_scale/stuck is -1, and a count"),
    "hysteresis": (
        _set_value("loss_scale/hysteresis", 9),
        "loss_scale/hysteresis is 9, which must lie between -1 and 2",
    ),
    "step": (_set_value("step", -3), "step is -3, and a count is never negative"),
    "wide step": (_widen_count("step"), r"step: int64\[\] in the file, int32\[\] in the state"),
    "wide skipped": (_widen_count("loss_scale/skipped"), r"loss_scale/skipped: int64\[\] in the file, int32\[\]"),
    "wide good_steps": (
        _widen_count("loss_scale/good_steps"),
        r"loss_scale/good_steps: int64\[\] in the file, int32\[\]",
    ),
    "shape": (lambda a: a.update({_last_parameter(a): np.zeros(77, "f4")}), r"float32\[77\] in the file, float32"),
    "dtype": (lambda a: a.update({_last_parameter(a): a[_last_parameter(a)].astype("f8")}), "float64.* in the file"),
    "missing": (lambda a: a.pop(_last_parameter(a)), "missing: model/"),
    "surplus": (lambda a: a.update(extra=np.zeros(3)), "not in this state: extra"),
}


def test_s22_a_forged_checkpoint_changes_nothing(backend: Backend, harness: Harness, tmp_path: Path) -> None:
    """A digest that is right proves nothing: everything is looked at before the first write."""
    state = resume_process.advance_state(resume_process.fresh_state(harness, "mlp", seed=0), 0, 2)
    before = state_bytes(backend, state)
    for name, (forge, message) in FORGERIES.items():
        arrays = backend.export_state(state)
        forge(arrays)
        polyamp.save(ForgedState(state, arrays), tmp_path / "forged")
        with pytest.raises(CheckpointError, match=message):
            polyamp.restore(state, tmp_path / "forged", on_change="accept")
        assert state_bytes(backend, state) == before, name


def step_once(state: Any, made: polyamp.Recipe) -> Any:
    """The state after one step."""
    return polyamp.train_step(loss_fn, made)(state, batch())[0]


@pytest.mark.parametrize("rate", [1.0, polyamp.schedules.cosine(0.5, 10)], ids=["number", "schedule"])
def test_s22_a_changed_recipe_is_said_and_the_codes_trains(
    backend: Backend, harness: Harness, tmp_path: Path, rate: Any
) -> None:
    old = recipe("mixed_float16", optimizer=polyamp.sgd(0.001), scaler=polyamp.LossScaler(init_scale=64.0))
    new = old.replace(optimizer=polyamp.sgd(rate), clip_norm=7.0)
    polyamp.save(polyamp.init(harness.mlp(layers()), old), tmp_path / "checkpoint")
    state = polyamp.init(harness.mlp(layers(seed=1)), new)
    before = state_bytes(backend, state)
    said = r"optimizer\.learning_rate: 0\.001 -> (1\.0|\{.*peak: 0\.5.*\})\n  clip_norm: None -> 7\.0\n"
    with pytest.raises(CheckpointError, match=said):
        polyamp.restore(state, tmp_path / "checkpoint")
    assert state_bytes(backend, state) == before
    with pytest.warns(UserWarning, match=said):
        state = polyamp.restore(state, tmp_path / "checkpoint", on_change="warn")
    want = step_once(polyamp.init(harness.mlp(layers()), new), new)
    assert np.array_equal(flat_weights(harness, step_once(state, new)), flat_weights(harness, want))
    assert not np.array_equal(flat_weights(harness, want), np.concatenate([part.ravel() for part in sum(layers(), ())]))


def test_s22_a_changed_scaler_holds_the_scale_or_starts_anew(
    backend: Backend, harness: Harness, tmp_path: Path
) -> None:
    scaler = polyamp.LossScaler(init_scale=2.0**20, hysteresis=3)
    polyamp.save(polyamp.init(harness.mlp(layers()), recipe(scaler=scaler)), tmp_path / "checkpoint")

    def restored(**settings: Any) -> list[float]:
        state = polyamp.init(harness.mlp(layers()), recipe(scaler=polyamp.LossScaler(**settings)))
        with pytest.raises(CheckpointError, match=r"scaler\."):
            polyamp.restore(state, tmp_path / "checkpoint")
        state = polyamp.restore(state, tmp_path / "checkpoint", on_change="accept")
        return [to_float(backend, value) for value in state.scale_state]

    assert restored(max_scale=2.0**16, hysteresis=2) == [2.0**16, 0, 2, 0, 0]
    assert restored(hysteresis=3, growth_interval=7) == [2.0**20, 0, 3, 0, 0]
    assert restored(kind="static", init_scale=8.0) == [8.0, 0, 1, 0, 0]


def test_s22_a_native_optimizers_changed_rate_is_said(backend: Backend, harness: Harness, tmp_path: Path) -> None:
    def fresh(rate: float, seed: int = 0) -> tuple[Any, polyamp.Recipe]:
        model = harness.mlp(layers(seed=seed))
        made = recipe(optimizer=harness.native_optimizer(model, rate))
        return polyamp.init(model, made), made

    try:
        state, _ = fresh(0.125)
    except UnsupportedError:
        return  # NumPy has no optimizers of its own
    polyamp.save(state, tmp_path / "checkpoint")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        polyamp.restore(fresh(0.125, seed=1)[0], tmp_path / "checkpoint")
    other, made = fresh(0.5, seed=1)
    with pytest.raises(CheckpointError, match=r"\n  optimizer\.\S*: -?0\.125 -> -?0\.5\n"):
        polyamp.restore(other, tmp_path / "checkpoint")
    other = polyamp.restore(other, tmp_path / "checkpoint", on_change="accept")
    state, made_again = fresh(0.5)
    assert np.array_equal(
        flat_weights(harness, step_once(other, made)), flat_weights(harness, step_once(state, made_again))
    )


def test_s22_a_step_is_pickled_and_copied_after_its_first_call(backend: Backend, harness: Harness) -> None:
    """What it has compiled stays behind; the copies go on where it is."""
    made = recipe("mixed_float16", optimizer=polyamp.adam(0.1), accumulate_steps=2)
    step = polyamp.train_step(loss_fn, made)
    state, _ = step(polyamp.init(harness.mlp(layers()), made), batch(0))
    unpickled = pickle.loads(pickle.dumps(step))  # noqa: S301  # its own bytes
    copies = [unpickled, copy.deepcopy(step), copy.copy(step), step]
    ends = []
    for each in copies:
        other = polyamp.init(harness.mlp(layers()), made)
        for seed in range(3):
            other, _ = each(other, batch(seed))
        ends.append(flat_weights(harness, other))
    assert all(np.array_equal(end, ends[0]) for end in ends)
    assert not np.array_equal(ends[0], flat_weights(harness, state))
    assert [each.recipe for each in copies] == [made] * 4
    assert copies[1].recipe is made


def test_s22_a_replay_gives_the_same_bits_and_leaves_the_state(backend: Backend, harness: Harness) -> None:
    """`polyamp.replay` runs a step twice from one state, also one whose gradients overflow."""
    made = stateful_recipe()
    state, _ = advance(polyamp.init(harness.normalized_mlp(layers()), made), [batch(0)])
    step = polyamp.train_step(loss_fn, made)
    before = {name: np.array(value) for name, value in backend.export_state(state).items()}
    for gain in (1.0, np.inf):
        report = polyamp.replay(step, state, batch(1, gain=gain))
        assert not is_on_cpu(backend) or report.differences == (), str(report)
        after = backend.export_state(state)
        assert changed_arrays(before, after) == []
