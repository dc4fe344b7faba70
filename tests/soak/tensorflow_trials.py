"""TensorFlow's trials: MirroredStrategy over logical CPUs, in this process.

Seeds in a row that differ in their data alone (`trial.SHARED`) share their states and what was compiled for them: each
begins with the states as new, with its own weights. The strategies of 2, 3 and 4 replicas have devices and collective
keys of their own, without which TensorFlow 2.21 takes one for the other.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import polyamp
from polyamp_keras.arrays import native_variable
from tests.soak import trial as trials_
from tests.soak.trial import Outcome, Trial

WORLDS: Final = trials_.ENGINES["tensorflow"]["mirrored"]
KEPT: Final = ("parameters", "optimizer", "buffers", "step")
"""What a skipped step leaves as it was."""
LIMITS: Final = {"float32": 1e-4, "mixed_bfloat16": 0.1, "mixed_float16": 0.02}
"""How far losses may be apart, relative to their size."""

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * sum(WORLDS)
)


@functools.cache
def strategy(world: int) -> Any:
    """The one of so many replicas; of one, TensorFlow's default."""
    if world == 1:
        return tf.distribute.get_strategy()
    first = sum(WORLDS[: WORLDS.index(world)])
    own = type("Mirrored", (tf.distribute.MirroredStrategy,), {"_collective_key_base": 100_000 * world})
    return own([f"CPU:{number}" for number in range(first, first + world)])


class Network(keras.Model):  # type: ignore[misc]  # Keras is untyped
    """Two hidden layers, a norm or none, and perhaps a parameter that is not used."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self.first = keras.layers.Dense(trials_.HIDDEN, name="first")
        self.second = keras.layers.Dense(trials_.HIDDEN, name="second")
        self.head = keras.layers.Dense(trials_.CLASSES, name="head")
        norms = {"layer": keras.layers.LayerNormalization, "batch": keras.layers.BatchNormalization}
        self.norm = norms[trial.norm]() if trial.norm else keras.layers.Identity()
        if trial.unused:
            self.unused = self.add_weight(shape=(trials_.HIDDEN,), initializer="ones", name="unused")

    def call(self, x: Any, training: bool = False) -> Any:
        hidden = keras.ops.relu(self.norm(self.first(x), training=training) if self.norm.built else self.first(x))
        return self.head(keras.ops.relu(self.second(hidden)))


def loss_fn(model: Any, batch: Any) -> Any:
    """Cross-entropy."""
    return polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"])


class Seen(NamedTuple):
    """What was seen of a trial.

    Attributes:
        decisions: by replica, (skipped, scale) after each step.
        digests: by replica, name -> digest after each step.
        losses: of each step.
        parameters: name -> array, of the first replica, after the last step.
    """

    decisions: list[list[tuple[bool, float]]]
    digests: list[list[dict[str, str]]]
    losses: list[float]
    parameters: dict[str, Any]


class Side:
    """A state of the trials that share one, and its step.

    Args:
        trial: the first of them.
        world: replicas, 1 for the one device.
        policy: that it trains with.
    """

    def __init__(self, trial: Trial, world: int, policy: str) -> None:
        self.world, self.strategy = world, strategy(world)
        alone = world == 1
        self.split = trial.accumulate * trial.world if alone and trial.norm == "batch" else 1
        recipe = trial.recipe(policy=policy, accumulate=self.split if alone else 0)
        with self.strategy.scope():
            model = Network(trial)
            model.norm.build((None, trials_.HIDDEN))
            model(np.zeros((1, trials_.INPUTS), np.float32))
            self.state = polyamp.init(model, recipe)
        self.step = polyamp.train_step(loss_fn, recipe)
        self.fresh = self.state.export()

    def begun(self, trial: Trial, nudge: float = 0.0) -> dict[str, Any]:
        """Everything as it is before the first step: as new, but for the trial's weights."""
        rng = np.random.default_rng(0)
        given = trial.weights()
        start = dict(self.fresh)
        for name in ("first", "second", "head"):
            for key, word in ((name, "kernel"), (f"{name}_bias", "bias")):
                moved = given[key] * (1 + nudge * rng.choice((-1, 1), given[key].shape)).astype(np.float32)
                assert f"model/{name}/{word}" in start
                start[f"model/{name}/{word}"] = moved
        return start

    def train(self, trial: Trial, nudge: float = 0.0) -> Seen:
        """One trial from its own weights, each moved by that share."""
        self.state.restore(self.begun(trial, nudge))
        seen = Seen([[] for _ in range(self.world)], [[] for _ in range(self.world)], [], {})
        for parts in trial.parts():
            whole: Any = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            if self.split > 1:
                several = {name: np.array_split(array, self.split) for name, array in whole.items()}
                whole = [{name: arrays[number] for name, arrays in several.items()} for number in range(self.split)]
            _, result = self.step(self.state, whole)
            seen.losses.append(float(result.loss))
            for replica, (scale, digests) in enumerate(self.copies(result)):
                seen.decisions[replica].append((bool(result.skipped), scale))
                seen.digests[replica].append(digests)
        parameters = self.state.variables.parameters
        seen.parameters.update({name: np.array(native_variable(variable)) for name, variable in parameters.items()})
        return seen

    def copies(self, result: Any) -> Iterator[tuple[float, dict[str, str]]]:
        """Each replica's scale, and digests of its copies."""
        state = self.state
        groups: dict[str, Iterable[Any]] = {
            "parameters": state.variables.parameters.values(),
            "optimizer": state.optimizer.variables,
            "buffers": state.variables.running.values(),
            "step": [state._step],
            "scale": state._scale,
        }
        each = {
            name: [self.strategy.experimental_local_results(native_variable(variable)) for variable in variables]
            for name, variables in groups.items()
        }
        said = digest([result.loss, result.grad_norm, result.scale, result.skipped, result.step])
        for replica in range(self.world):
            own = {name: digest(copies[replica] for copies in found) for name, found in each.items()}
            yield float(each["scale"][0][replica]), {**own, "result": said}


def digest(values: Iterable[Any]) -> str:
    """Of tensors, bit for bit."""
    made = hashlib.blake2b(digest_size=8)
    for value in values:
        made.update(np.ascontiguousarray(value).tobytes())
    return made.hexdigest()


def judged(trial: Trial, own: Seen, one: Callable[[str, float], Seen], start: dict[str, Any]) -> Outcome:
    """What did not hold.

    Args:
        trial: which.
        own: of the replicas.
        one: `one(policy, nudge)` trains one device.
        start: the initial arrays.
    """
    base = one(trial.policy, 0.0)
    failures = trials_.decisions(trial, own.decisions, [scale for _, scale in base.decisions[0]])
    failures += trials_.alike(own.digests)
    failures += trials_.untouched(trial, own.digests, KEPT)
    apart, said = trials_.near(trial, own.parameters, lambda policy, nudge: one(policy, nudge).parameters, start)
    failures += said
    limit = LIMITS[trial.policy]
    failures += [
        f"losses of step {step}: {mine:g}, on one device {other:g}"
        for step, (mine, other) in enumerate(zip(own.losses, base.losses, strict=True))
        if not (trial.skipped[step] or abs(mine - other) <= limit * max(abs(other), 0.1))
    ][:1]
    if trial.unused and not np.array_equal(own.parameters["unused"], start["unused"]):
        failures.append("the unused parameter moved")
    return Outcome(
        seed=trial.seed,
        engine=trial.engine,
        world=trial.world,
        steps=trial.steps,
        skipped=sum(trial.skipped),
        failures=failures,
        apart=apart,
        seconds=0.0,
    )


def trials(seeds: Sequence[int]) -> Iterator[Outcome]:
    """The outcomes of these seeds."""
    for _, group in itertools.groupby(seeds, lambda seed: seed // trials_.SHARED["tensorflow"]):
        those = [trials_.draw("tensorflow", seed) for seed in group]
        sides: dict[tuple[int, str], Side] = {}
        for trial in those:
            began = time.perf_counter()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    outcome = _run(trial, sides)
            except Exception:  # noqa: BLE001  # whatever it is, it is this trial's
                outcome = trials_.broken(trial, traceback.format_exc()[-2000:])
            yield outcome._replace(seconds=time.perf_counter() - began)


def _run(trial: Trial, sides: dict[tuple[int, str], Side]) -> Outcome:
    known: dict[tuple[str, float], Seen] = {}

    def side(world: int, policy: str) -> Side:
        if (world, policy) not in sides:
            sides[world, policy] = Side(trial, world, policy)
        return sides[world, policy]

    def one(policy: str, nudge: float) -> Seen:
        if (policy, nudge) not in known:
            known[policy, nudge] = side(1, policy).train(trial, nudge)
        return known[policy, nudge]

    own = side(trial.world, trial.policy).train(trial)
    begun = side(trial.world, trial.policy).begun(trial)
    return judged(trial, own, one, {name: begun[f"model/{name}"] for name in own.parameters})
