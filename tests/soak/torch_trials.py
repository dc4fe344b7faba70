"""torch's trials: DistributedDataParallel and `fully_shard`, on one mesh axis and on two, in processes on loopback.

Many trials share a launch of ranks, which takes tenths of a second; where a launch ends badly or not at all, each of
its trials is run in one of its own, so that the one to blame is known. The device that is given the whole batch is this
process.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import nn

import polyamp
from tests import ranks
from tests.soak import trial as trials_
from tests.soak.trial import Outcome, Trial

TOGETHER: Final = 20
"""Trials of a launch."""
SECONDS: Final = 20.0
"""Of a trial in a launch of its own, after which it counts as hanging; a launch of many has so many for the first and a
fifth for each other."""
SHARDED: Final = ("fsdp2", "hsdp")
KEPT: Final = ("parameters", "optimizer", "buffers", "step")
"""What a skipped step leaves as it was."""


class Seen(NamedTuple):
    """What a replica, or the one device, saw of a trial.

    Attributes:
        decisions: (skipped, scale) after each step.
        digests: name -> digest after each step.
        losses: of each step.
        parameters: name -> array, whole, after the last step.
        seconds: that it took.
    """

    decisions: list[tuple[bool, float]]
    digests: list[dict[str, str]]
    losses: list[float]
    parameters: dict[str, Any]
    seconds: float


class Network(nn.Module):
    """Two hidden layers, a norm or none, and perhaps a parameter that is not used."""

    def __init__(self, trial: Trial, weights: dict[str, Any]) -> None:
        super().__init__()
        self.first = nn.Linear(trials_.INPUTS, trials_.HIDDEN)
        self.second = nn.Linear(trials_.HIDDEN, trials_.HIDDEN)
        self.head = nn.Linear(trials_.HIDDEN, trials_.CLASSES)
        norms = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d}
        self.norm = norms[trial.norm](trials_.HIDDEN) if trial.norm else nn.Identity()
        if trial.unused:
            self.unused = nn.Parameter(torch.from_numpy(weights["unused"]).clone())
        with torch.no_grad():
            for name in ("first", "second", "head"):
                layer = getattr(self, name)
                layer.weight.copy_(torch.from_numpy(weights[name].T.copy()))
                layer.bias.copy_(torch.from_numpy(weights[f"{name}_bias"]))

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(torch.relu(self.second(torch.relu(self.norm(self.first(x))))))


def loss_fn(model: Any, batch: Any) -> Any:
    """Cross-entropy."""
    return polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"])


def engine(trial: Trial, model: nn.Module) -> nn.Module:
    """The model in the trial's engine."""
    if trial.engine in SHARDED:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        named = (2, 2), ("replicate", "shard")
        mesh = init_device_mesh("cpu", named[0], mesh_dim_names=named[1]) if trial.engine == "hsdp" else None
        for layer in (model.second, model.head):
            fully_shard(layer, mesh=mesh)  # type: ignore[arg-type]  # a submodule, which nn.Module's types do not know
        return fully_shard(model, mesh=mesh)
    static = trial.engine == "ddp-static"
    return nn.parallel.DistributedDataParallel(
        model, static_graph=static, find_unused_parameters=trial.unused and not static
    )


def replica(rank: int, trials: Sequence[Trial]) -> list[Seen]:
    """One rank's share of a launch."""
    return [trained(trial, engine(trial, Network(trial, trial.weights())), rank) for trial in trials]


def trained(trial: Trial, model: nn.Module, rank: int) -> Seen:
    """One rank of a trial."""
    began = time.perf_counter()
    recipe = trial.recipe()
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(loss_fn, recipe)
    seen = Seen([], [], [], {}, 0.0)
    for parts in trial.parts():
        state, result = step(state, parts[rank])
        seen.decisions.append((bool(result.skipped), float(result.scale)))
        seen.losses.append(float(result.loss))
        seen.digests.append(digests(state, result))
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter  # type: ignore[operator]  # a DTensor's method
        seen.parameters[name.removeprefix("module.")] = whole.detach().numpy().copy()
    return seen._replace(seconds=time.perf_counter() - began)


def digests(state: Any, result: Any) -> dict[str, str]:
    """Of everything that a rank holds after a step."""
    slots = [[value for _, value in sorted(slot.items())] for slot in state.optimizer.state.values()]
    return {
        "parameters": digest(state.model.parameters()),
        "optimizer": digest(value for slot in slots for value in slot),
        "buffers": digest(state.model.buffers()),
        "step": digest([state.step]),
        "scale": digest(state.scale_state),
        "result": digest([result.loss, result.grad_norm, result.scale, result.skipped, result.step]),
    }


def digest(values: Any) -> str:
    """Of tensors, bit for bit; of sharded ones the part that lies here."""
    made = hashlib.blake2b(digest_size=8)
    for value in values:
        local = value.to_local() if hasattr(value, "to_local") else value
        array = local.detach().numpy() if isinstance(local, torch.Tensor) else np.asarray(local)
        made.update(np.ascontiguousarray(array).tobytes())
    return made.hexdigest()


def one(trial: Trial, policy: str, nudge: float) -> Seen:
    """The same on one device: the whole batch at once, or, where each micro-batch is normalised by itself, in those."""
    rng = np.random.default_rng(0)
    weights = {
        name: array * (1 + nudge * rng.choice((-1, 1), array.shape)).astype(np.float32)
        for name, array in trial.weights().items()
    }
    split = trial.accumulate * trial.world if trial.norm == "batch" else 1
    model = Network(trial, weights)
    recipe = trial.recipe(policy=policy, accumulate=split)
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(loss_fn, recipe)
    seen = Seen([], [], [], {}, 0.0)
    for parts in trial.parts():
        whole: Any = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        if split > 1:
            several = {name: np.array_split(array, split) for name, array in whole.items()}
            whole = [{name: arrays[number] for name, arrays in several.items()} for number in range(split)]
        state, result = step(state, whole)
        seen.decisions.append((bool(result.skipped), float(result.scale)))
        seen.losses.append(float(result.loss))
    seen.parameters.update({name: p.detach().numpy().copy() for name, p in model.named_parameters()})
    return seen


def judged(trial: Trial, replicas: Sequence[Seen]) -> Outcome:
    """What did not hold in a trial that every rank came through."""
    base = one(trial, trial.policy, 0.0)
    start = {name: p.detach().numpy() for name, p in Network(trial, trial.weights()).named_parameters()}
    failures = trials_.decisions(trial, [seen.decisions for seen in replicas], [scale for _, scale in base.decisions])
    failures += _alike(trial, [seen.digests for seen in replicas])
    failures += trials_.untouched(trial, [seen.digests for seen in replicas], KEPT)
    apart, said = trials_.near(
        trial,
        replicas[0].parameters,
        lambda policy, nudge: (
            (base if (policy, nudge) == (trial.policy, 0.0) else one(trial, policy, nudge)).parameters
        ),
        start,
    )
    failures += said
    limit = {"float32": 1e-4, "mixed_bfloat16": 0.1, "mixed_float16": 0.02}[trial.policy]
    wrong = [
        (step, own, other)
        for step, (own, other) in enumerate(zip(replicas[0].losses, base.losses, strict=True))
        if not (trial.skipped[step] or abs(own - other) <= limit * max(abs(other), 0.1))
    ]
    failures += [f"losses of step {step}: {own:g}, on one device {other:g}" for step, own, other in wrong[:1]]
    if trial.unused and not np.array_equal(replicas[0].parameters["unused"], start["unused"]):
        failures.append("the unused parameter moved")
    return Outcome(
        seed=trial.seed,
        engine=trial.engine,
        world=trial.world,
        steps=trial.steps,
        skipped=sum(trial.skipped),
        failures=failures,
        apart=apart,
        seconds=max(seen.seconds for seen in replicas),
    )


def _alike(trial: Trial, each: Sequence[Sequence[dict[str, str]]]) -> list[str]:
    """Everything, or, of what is sharded, what the ranks with the same shard hold."""
    if trial.engine not in SHARDED:
        return trials_.alike(each)
    local = ("parameters", "optimizer")
    shared = [[{n: d for n, d in step.items() if n not in local} for step in rank] for rank in each]
    found = trials_.alike(shared)
    if trial.engine == "hsdp":
        for place in range(2):
            found += trials_.alike([each[place], each[place + 2]])
    return found


def trials(seeds: Sequence[int]) -> Iterator[Outcome]:
    """The outcomes of these seeds, those of one world size after those of another."""
    drawn = [trials_.draw("torch", seed) for seed in seeds]
    for world in sorted({trial.world for trial in drawn}):
        those = [trial for trial in drawn if trial.world == world]
        for first in range(0, len(those), TOGETHER):
            yield from _launched(those[first : first + TOGETHER])


def _launched(some: Sequence[Trial]) -> Iterator[Outcome]:
    timeout = SECONDS * (1 + len(some) / 5)
    found = ranks.outcomes(replica, some[0].world, some, timeout=timeout, collective_timeout=SECONDS)
    if all(each.exitcode == 0 and not each.error for each in found):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield from (
                judged(*both) for both in zip(some, zip(*[each.value for each in found], strict=True), strict=True)
            )
    elif len(some) > 1:
        for trial in some:
            yield from _launched([trial])
    else:
        said = [f"rank {rank} ended with {each.exitcode}: {each.error[:2000]}" for rank, each in enumerate(found)]
        failed = [text for text, each in zip(said, found, strict=True) if each.exitcode != 0]
        yield trials_.broken(some[0], *failed, seconds=max(each.seconds for each in found))
