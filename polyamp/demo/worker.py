"""Main program of the process that trains the digits in one framework.

It uses only polyamp's public functions and the digits model of the backend's harness.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import polyamp
from polyamp import losses
from polyamp.contract import registry
from polyamp.demo.comparison_report import FrameworkRun
from polyamp.errors import PolyampError
from polyamp.parity.execution.memory_mapped_arrays import BatchTree, load_batch
from polyamp.parity.execution.side_worker import SideWorker
from polyamp.parity.execution.worker_messages import (
    ParityEvent,
    SideBuildEvent,
    SideFinishEvent,
    SideProgressEvent,
    WorkerJob,
    WorkerMessage,
)
from polyamp.parity.report_data import Environment, Failure
from polyamp.parity.trainers import RecipeTrainer
from polyamp.recipe.recipe import Recipe


class DigitsJob(WorkerJob, frozen=True, kw_only=True):
    """Job of a worker. Its side is the name of a backend.

    Attributes:
        arrays: path of the file of the problem's arrays.
        problem: `digits.problem`, stored in that file.
        recipes: policy -> recipe as JSON text, in the order to run them.
        baseline: the policy from which distances are measured.
    """

    arrays: str
    problem: BatchTree
    recipes: dict[str, str]
    baseline: str


class PolicyResultEvent(msgspec.Struct, frozen=True, kw_only=True, tag="policy"):
    """The training under one policy has ended: with `run`, or with `failure`."""

    run: FrameworkRun | None = None
    failure: Failure | None = None


DemoEvent = ParityEvent | PolicyResultEvent
DemoMessage = WorkerMessage | PolicyResultEvent


class DigitsWorker(SideWorker[DigitsJob]):
    """Worker that trains the digits under each of the job's policies. If a policy is refused, the others go on."""

    def run_job(self) -> None:
        """Train under every policy."""
        job, self.activity = self.job, ""
        self._backend = registry.get(job.side)
        self._problem = load_batch(Path(job.arrays), job.problem)
        self.emit(SideBuildEvent(side=job.side, environment=self._environment(), recipe=None))
        for policy in job.recipes:
            self.phase, self.step = policy, 0
            try:
                self.emit(PolicyResultEvent(run=self._train(policy)))
            except PolyampError as error:
                self.emit(PolicyResultEvent(failure=self.failure("error", str(error))))
        self.emit(SideFinishEvent(side=job.side))

    def _environment(self) -> Environment:
        info = self._backend.info()
        return Environment(
            side=self.job.side,
            backend=self._backend.name,
            versions={info.framework: str(info.version)},
            device=info.devices[0],
            model="digits transformer",
            parameters=sum(array.size for array in self._problem["weights"].values()),
        )

    def _train(self, policy: str) -> FrameworkRun:
        """Train under one policy and measure it."""
        trainer = self._trainer(policy)
        results: list[Mapping[str, float]] = []
        times: list[float] = []
        skipped = 0
        for number in range(self._steps):
            self.step = number + 1
            result = trainer.step(self._batch(number))
            results.append(result)
            times.append(trainer.seconds)
            skipped += not result["finite"]
            event = SideProgressEvent(
                side=self.job.side,
                phase=policy,
                step=self.step,
                steps=self._steps,
                loss=_none_if_nonfinite(result["loss"]),
                scale=result["scale"],
                skipped=skipped,
            )
            self.emit(event)
        skips = [not result["finite"] for result in results]
        environment = self._environment()
        return FrameworkRun(
            backend=self.job.side,
            policy=policy,
            version=next(iter(environment.versions.values())),
            device=environment.device,
            losses=[_none_if_nonfinite(result["loss"]) for result in results],
            grad_norms=[_none_if_nonfinite(result["grad_norm"]) for result in results],
            scales=[result["scale"] for result in results],
            skips=skips,
            accuracy=self._accuracy(trainer),
            applied=int(results[-1]["applied"]),
            ms_per_step=1000.0 * statistics.median(times[1:] or times),
            twin_losses=self._float32_twin_losses(skips) if any(skips) else None,
        )

    def _float32_twin_losses(self, skips: Sequence[bool]) -> list[float | None]:
        """Return the float32 losses of a run without the updates of the steps in `skips`."""
        trainer, look = self._trainer(self.job.baseline), polyamp.value_and_grad(loss_fn)
        curve = []
        for number, is_skipped in enumerate(skips):
            batch = self._batch(number)
            if is_skipped:
                loss = float(self._backend.to_numpy(look(trainer.state, batch)[0]))
            else:
                loss = trainer.step(batch)["loss"]
            curve.append(_none_if_nonfinite(loss))
        return curve

    def _trainer(self, policy: str) -> RecipeTrainer:
        recipe = Recipe.from_json(self.job.recipes[policy])
        model = self._backend.testing().digits(self._problem["weights"])
        return RecipeTrainer(model, recipe, loss_fn, {"init": {"backend": self._backend.name}, "step": {}})

    @property
    def _steps(self) -> int:
        return len(self._problem["x"])

    def _batch(self, number: int) -> dict[str, Any]:
        return {name: self._problem[name][number] for name in ("x", "y")}

    def _accuracy(self, trainer: RecipeTrainer) -> float:
        state = trainer.state
        predict = state.recipe.policy.autocast(state.model, backend=self._backend.name)
        logits = self._backend.to_numpy(predict(self._backend.testing().array(self._problem["test_x"])))
        return float((logits.astype("float32").argmax(axis=-1) == self._problem["test_y"]).mean())


def loss_fn(model: Any, batch: Any) -> Any:
    """Return the loss of the digits, with the same code in every framework."""
    return losses.softmax_cross_entropy(model(batch["x"]), batch["y"])


def _none_if_nonfinite(number: float) -> float | None:
    return number if math.isfinite(number) else None


if __name__ == "__main__":
    DigitsWorker.main(DigitsJob)
