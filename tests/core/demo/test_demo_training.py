"""The arithmetic of a parity report and the runner's processes; no framework is needed."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyamp import BackendError, LossScaler, PolicyError, Recipe, RecipeError, __version__, adam, sgd
from polyamp.demo import runner, worker
from polyamp.demo.comparison_report import DemoReport, FrameworkRun, compare, distance
from polyamp.parity.execution.memory_mapped_arrays import ArrayStore
from polyamp.parity.execution.worker_messages import ParityEvent, SideBuildEvent, SideFinishEvent, SideProgressEvent
from polyamp.reference import MLP
from polyamp.reference.harness import ReferenceHarness


def make_run(
    backend: str = "torch",
    policy: str = "float32",
    losses: Sequence[float | None] | None = None,
    skips: Sequence[int] = (),
    twin: Sequence[float | None] | None = None,
) -> FrameworkRun:
    curve: list[float | None] = [1.0] * 30 if losses is None else list(losses)
    return FrameworkRun(
        backend=backend,
        policy=policy,
        version="1.2.3",
        device="cpu",
        losses=curve,
        grad_norms=[None if step in skips else 1.0 for step in range(len(curve))],
        scales=[2.0**15] * len(curve),
        skips=[step in skips for step in range(len(curve))],
        accuracy=0.9,
        applied=len(curve) - len(skips),
        ms_per_step=1.5,
        twin_losses=None if twin is None else list(twin),
    )


# ---------------------------------------------------------------- arithmetic


def test_distance_is_the_largest_relative_difference() -> None:
    assert distance([2.0, 1.0, 4.0], [2.0, 1.0, 5.0]) == pytest.approx(0.2)
    assert distance([2.0, 1.0, 4.0], [2.0, 1.0, 5.0], steps=2) == 0.0


def test_distance_below_the_floor_is_absolute() -> None:
    assert distance([1e-5], [2e-5]) == pytest.approx(1e-5 / 1e-2)


def test_distance_of_values_that_are_not_finite() -> None:
    assert distance([None, 1.0], [None, 1.0]) == 0.0
    assert distance([None, 1.0], [2.0, 1.0]) is None


@pytest.mark.parametrize(("shift", "within"), [(4e-5, True), (6e-5, False)])
def test_float32_is_held_to_the_tolerance(shift: float, within: bool) -> None:
    (comparison,) = compare([make_run("torch"), make_run("jax", losses=[1.0] * 29 + [1.0 - shift])], "float32")
    assert comparison.pairs[0].limit == 5e-5
    assert comparison.within is within
    assert comparison.from_float32 == {}


def test_steps_after_the_hundredth_do_not_decide() -> None:
    long = make_run("jax", losses=[1.0] * 100 + [2.0])
    (comparison,) = compare([make_run(losses=[1.0] * 101), long], "float32")
    assert comparison.within
    assert comparison.pairs[0].steps == 100
    assert comparison.pairs[0].whole_run == 0.5


@pytest.mark.parametrize(("other", "within"), [(0.98, True), (0.96, False)])
def test_mixed_is_held_to_twice_the_larger_own_distance_from_float32(other: float, within: bool) -> None:
    curve = [1.0] * 29 + [other]
    runs = [
        make_run("torch"),
        make_run("jax", losses=curve),
        make_run("torch", "bf16", losses=[1.0] * 29 + [0.99]),
        make_run("jax", "bf16", losses=curve),
    ]
    comparison = compare(runs, "float32")[1]
    assert comparison.from_float32 == {"torch": pytest.approx(0.01), "jax": 0.0}
    assert comparison.pairs[0].limit == pytest.approx(0.02)
    assert comparison.pairs[0].distance == pytest.approx(1.0 - other / 0.99)
    assert comparison.within is within


def test_the_twin_takes_the_place_of_float32_where_steps_were_skipped() -> None:
    skipped = [2.0] * 30
    runs = [
        make_run("torch"),
        make_run("jax"),
        make_run("torch", "fp16", losses=skipped, skips=[0], twin=skipped),
        make_run("jax", "fp16", losses=[2.0] * 29 + [1.9], skips=[0], twin=skipped),
    ]
    comparison = compare(runs, "float32")[1]
    assert comparison.from_float32 == {"torch": 0.0, "jax": pytest.approx(0.05)}
    assert comparison.pairs[0].limit == pytest.approx(0.1)
    assert comparison.within


def test_runs_that_skip_different_steps_are_compared_up_to_there() -> None:
    other = make_run("jax", losses=[1.0] * 25 + [3.0] * 5, skips=[24])
    (comparison,) = compare([make_run(), other], "float32")
    assert comparison.pairs[0].parted == 24
    assert comparison.pairs[0].steps == 25
    assert comparison.pairs[0].distance == 0.0
    assert comparison.within


def test_runs_that_part_at_once_are_outside() -> None:
    (comparison,) = compare([make_run(), make_run("jax", skips=[3])], "float32")
    assert comparison.pairs[0].parted == 3
    assert not comparison.within


def test_one_finite_and_one_infinite_curve_are_outside() -> None:
    (comparison,) = compare([make_run(), make_run("jax", losses=[None] + [1.0] * 29)], "float32")
    assert comparison.pairs[0].distance is None
    assert not comparison.within


def test_the_worst_pair_comes_first() -> None:
    runs = [make_run("a"), make_run("b", losses=[1.0] * 29 + [0.9]), make_run("c", losses=[1.0] * 29 + [1.2])]
    (comparison,) = compare(runs, "float32")
    assert [pair.backends for pair in comparison.pairs] == [("b", "c"), ("a", "c"), ("a", "b")]


def test_one_run_has_nothing_to_be_compared_with() -> None:
    assert compare([make_run()], "float32") == []


# ---------------------------------------------------------------- recipes


def test_the_scaler_is_the_recipes_where_float16_needs_one_and_off_elsewhere() -> None:
    recipe = Recipe(scaler=LossScaler(init_scale=8.0), optimizer=sgd(0.1))
    assert runner.recipe_for(recipe, "mixed_float16").loss_scaler.init_scale == 8.0
    assert runner.recipe_for(recipe, "float32").loss_scaler == LossScaler.off()
    assert runner.recipe_for(recipe, "bf16-mixed").loss_scaler == LossScaler.off()


def test_mode_and_overrides_stay_but_overrides_do_not_touch_float32() -> None:
    from polyamp import Policy

    recipe = Recipe(policy=Policy("mixed_float16", mode="cast", overrides={"head": "float32"}))
    assert runner.recipe_for(recipe, "bf16").policy == Policy("bf16", mode="cast", overrides={"head": "float32"})
    assert runner.recipe_for(recipe, "float32").policy == Policy("float32", mode="cast")


def test_the_demos_recipe_starts_with_a_scale_that_float16_cannot_hold() -> None:
    recipe = runner.demo_recipe()
    assert recipe.clip_norm == 1.0
    assert recipe.loss_scaler.init_scale == 2.0**24
    assert recipe.optimizer.learning_rate.total_steps == runner.STEPS


# ---------------------------------------------------------------- arguments


def test_an_unknown_backend_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(BackendError, match=r"Received: 'torhc'\. Did you mean 'torch'\?"):
        runner.run(Recipe(), backends=["torhc"])


def test_an_interpreter_for_a_backend_that_does_not_run_is_refused() -> None:
    with pytest.raises(BackendError, match="an interpreter was given for jax"):
        runner.run(Recipe(), backends=["torch"], interpreters={"jax": sys.executable})


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(PolicyError, match="mixed_flot16"):
        runner.run(Recipe(), policies=["mixed_flot16"])


@pytest.mark.parametrize("settings", [{"steps": 0}, {"batch_size": 0}, {"batch_size": 2000}, {"batch_size": 33}])
def test_impossible_sizes_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(RecipeError, match=f"Received: {next(iter(settings))}"):
        runner.run(Recipe(accumulate_steps=2), **settings)  # type: ignore[arg-type]


# ---------------------------------------------------------------- processes


def interpreter(folder: Path, name: str, body: str) -> Path:
    """A program that stands in for a Python interpreter with a framework: it says hello and gets the job."""
    path = folder / name
    hello = json.dumps({"type": "hello", "polyamp": __version__, "python": "3"})
    path.write_text(
        f"#!{sys.executable}\nimport json, sys, time\nprint({hello!r}, flush=True)\n"
        f"job = json.loads(sys.stdin.readline())\n{body}\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


HONEST = """
for policy in job["recipes"]:
    steps = 30
    run = dict(backend=job["side"], policy=policy, version="9.9", device="cpu", losses=[1.0] * steps,
               grad_norms=[1.0] * steps, scales=[1.0] * steps, skips=[False] * steps, accuracy=0.5, applied=steps,
               ms_per_step=1.0)
    print(json.dumps({"type": "policy", "run": run}))
print(json.dumps({"type": "finished", "side": job["side"]}), flush=True)
sys.stdin.read()
"""


def quick(interpreters: dict[str, Path], **settings: Any) -> DemoReport:
    return runner.run(Recipe(), backends=list(interpreters), interpreters=interpreters, steps=2, **settings)


def test_two_frameworks_that_agree(tmp_path: Path) -> None:
    honest = interpreter(tmp_path, "honest", HONEST)
    events: list[ParityEvent] = []
    report = quick({"torch": honest, "jax": honest}, policies=["mixed_bfloat16"], on_event=events.append)
    assert report.ok
    assert [(run.backend, run.policy) for run in report.runs] == [
        ("torch", "float32"),
        ("torch", "mixed_bfloat16"),
        ("jax", "float32"),
        ("jax", "mixed_bfloat16"),
    ]
    assert [type(event).__name__ for event in events] == ["SideLaunchEvent", "SideFinishEvent"] * 2
    assert report.baseline == "float32"
    assert report.recipes["mixed_bfloat16"]["policy"]["compute"] == "bfloat16"


def test_the_report_survives_json(tmp_path: Path) -> None:
    report = quick({"torch": interpreter(tmp_path, "honest", HONEST)})
    assert DemoReport.from_json(report.to_json()) == report
    assert json.loads(report.to_json())["ok"] is True


def test_a_dying_worker_is_reported_with_the_end_of_its_stderr_and_the_others_run(tmp_path: Path) -> None:
    dying = interpreter(tmp_path, "dying", 'sys.stderr.write("line 1\\nBoom: out of luck\\n"); sys.exit(3)')
    report = quick({"torch": dying, "jax": interpreter(tmp_path, "honest", HONEST)})
    (failure,) = report.failures
    assert failure.backend == "torch"
    assert failure.message == (
        "the process ended itself with exit status 3. The end of its standard error:\nline 1\nBoom: out of luck"
    )
    assert {run.backend for run in report.runs} == {"jax"}
    assert not report.ok


def test_a_worker_that_hangs_is_ended_at_the_time_limit(tmp_path: Path) -> None:
    report = quick({"torch": interpreter(tmp_path, "hanging", "time.sleep(60)")}, timeout=0.3)
    assert report.failures[0].message == (
        "ended after the time limit of 0.3 s (timeout=). It wrote nothing to standard error."
    )
    assert report.seconds < 10.0


def test_a_worker_of_another_version_is_reported(tmp_path: Path) -> None:
    other = interpreter(tmp_path, "other", "")
    other.write_text(other.read_text().replace(__version__, "0.0.1"))
    (failure,) = quick({"torch": other}).failures
    assert failure.message == (
        f"{other} has polyamp 0.0.1, and the run was started by polyamp {__version__}. Install the same there: {other} "
        f"-m pip install polyamp=={__version__}"
    )


def test_a_worker_that_says_what_cannot_be_read_is_reported(tmp_path: Path) -> None:
    report = quick({"torch": interpreter(tmp_path, "other", "print('hello', flush=True); time.sleep(60)")})
    assert f"sent what polyamp {__version__} cannot read" in report.failures[0].message
    assert len(report.failures) == 1


def test_an_interpreter_that_is_not_there_is_reported(tmp_path: Path) -> None:
    report = quick({"torch": tmp_path / "nowhere"})
    said = f"the interpreter {tmp_path / 'nowhere'} cannot be started: No such file or directory. interpreters="
    assert report.failures[0].message.startswith(said)


def test_a_framework_that_is_not_installed_is_no_failure_but_nothing_ran(tmp_path: Path) -> None:
    failure = {"side": "torch", "phase": "", "step": 0, "reason": "missing", "message": "Run: pip"}
    absent = interpreter(tmp_path, "absent", f'print(json.dumps({{"type": "failed", "failure": {failure}}}))')
    report = quick({"torch": absent})
    assert report.missing == {"torch": "Run: pip"}
    assert report.failures == []
    assert not report.ok


def test_a_real_worker_reports_what_the_backend_refuses() -> None:
    report = runner.run(Recipe(), backends=["reference"], interpreters={"reference": sys.executable}, steps=2)
    assert [(failure.backend, failure.policy) for failure in report.failures] == [
        ("reference", "float32"),
        ("reference", "mixed_bfloat16"),
        ("reference", "mixed_float16"),
    ]
    assert "needs a framework" in report.failures[0].message


# ---------------------------------------------------------------- the worker's training


@pytest.fixture
def flat_digits(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A problem that the reference backend can train: 4 numbers in, 3 classes."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(3, 4)).astype(np.float32)
    labels = rng.integers(0, 3, (31, 16)).astype(np.int32)
    points = centres[labels] + 0.1 * rng.normal(size=(31, 16, 4)).astype(np.float32)
    monkeypatch.setattr(ReferenceHarness, "digits", lambda self, weights: MLP.random([4, 8, 3], seed=0))
    return {"weights": {}, "x": points[:30], "y": labels[:30], "test_x": points[30], "test_y": labels[30]}


def test_the_worker_trains_skips_and_retraces_in_float32(flat_digits: dict[str, Any], tmp_path: Path) -> None:
    recipe = Recipe(scaler=LossScaler(init_scale=2.0**22, growth_interval=8), optimizer=adam(0.05), clip_norm=1.0)
    with ArrayStore(tmp_path / "arrays") as store:
        problem = store.put_tree(flat_digits, "problem")
    job = worker.DigitsJob(
        side="reference",
        arrays=str(tmp_path / "arrays"),
        problem=problem,
        recipes={name: runner.recipe_for(recipe, name).to_json() for name in ("float32", "mixed_float16")},
        baseline="float32",
    )
    events: list[Any] = []
    worker.DigitsWorker(job, events.append, lambda kind: None).run_to_end()
    plain, half = (event.run for event in events if isinstance(event, worker.PolicyResultEvent))
    assert isinstance(events[0], SideBuildEvent)
    assert events[-1] == SideFinishEvent(side="reference")
    steps = [(each.phase, each.step) for each in events if isinstance(each, SideProgressEvent)]
    assert steps == [(policy, step) for policy in ("float32", "mixed_float16") for step in range(1, 31)]
    last = events[-3]
    assert (last.loss, last.scale, last.skipped) == (half.losses[-1], half.scales[-1], half.skipped)

    assert plain.skipped == 0
    assert plain.twin_losses is None
    assert plain.scales == [1.0] * 30
    assert plain.accuracy == 1.0

    assert half.skips[0]
    assert half.applied + half.skipped == 30
    assert half.scales[0] == 2.0**21
    assert half.grad_norms[0] is None
    assert half.twin_losses is not None
    after_skip = half.skips.index(False)
    assert distance(half.losses, half.twin_losses) < 0.01  # type: ignore[operator]  # both are finite
    assert distance(half.losses[after_skip + 1 :], plain.losses[after_skip + 1 :]) > 0.05  # type: ignore[operator]


@pytest.mark.parametrize(("parted", "within"), [(19, False), (20, True)])
def test_the_least_shared_step_itself_is_inside(parted: int, within: bool) -> None:
    (comparison,) = compare([make_run(), make_run("jax", skips=[parted])], "float32")
    assert comparison.within is within


def test_a_pair_without_a_distance_comes_first() -> None:
    runs = [
        make_run("a"),
        make_run("b", losses=[1.0] * 29 + [0.9]),
        make_run("c", losses=[None] + [1.0] * 29),
    ]
    (comparison,) = compare(runs, "float32")
    assert [pair.distance is None for pair in comparison.pairs] == [True, True, False]


def test_the_limit_comes_from_the_shared_steps_alone() -> None:
    runs = [
        make_run("torch"),
        make_run("jax"),
        make_run("torch", "fp16"),
        make_run("jax", "fp16", losses=[1.0] * 24 + [1.01] + [9.0] * 5, skips=[24]),
    ]
    assert compare(runs, "float32")[1].pairs[0].limit == pytest.approx(2 * 0.01 / 1.01)
