"""The adapters between two processes: the libraries' engines skip on all ranks together, with the numbers of a loop by
hand (S9, S12, S13). One launch runs every loop, because the imports cost most."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import MixedPrecisionPolicy

from polyamp.errors import UnsupportedError
from tests import ranks
from tests.backends.torch.integrations import monitor_loops, rank_trainer
from tests.backends.torch.integrations import rank_loops as loops

SKIPPED = [False, True, False, True, False, False]
SCALES = [16.0, 8.0, 8.0, 4.0, 4.0, 8.0]
ENGINES = {"ddp": "sgd", "fsdp2": "fused"}
"""Engine -> optimizer."""
LIBRARIES = ("lightning", "fabric", "accelerate")
Found = list[dict[str, Any]]


def everything(rank: int, folder: str) -> dict[str, Any]:
    """Every loop in this process, by name."""
    warnings.simplefilter("ignore")  # libraries advise about workers, samplers and threads
    logging.disable(logging.WARNING)
    found: dict[str, Any] = {}
    for engine, kind in ENGINES.items():
        found[f"hand {engine}"] = loops.by_hand(rank, engine, kind)
        found[f"lightning {engine}"] = loops.lightning(rank, engine, kind, f"{folder}/lightning {engine}")
        found[f"fabric {engine}"] = loops.fabric(rank, engine, kind)
        found[f"accelerate {engine}"] = loops.accelerated(rank, engine, kind, f"{folder}/accelerate {engine}")
        found[f"trainer {engine}"] = rank_trainer.trained(rank, engine, folder)
        found[f"trainer {engine} resumed"] = rank_trainer.trained(rank, engine, folder, resume=True)
    found["hand one"] = loops.by_hand(rank, "one", "sgd")
    found["lightning tensor"] = loops.lightning(rank, "tensor", "sgd")
    found["plain lightning"] = loops.lightning(rank, "ddp", "sgd", plain=True)
    found["plain accelerate"] = loops.accelerated(rank, "fsdp2", "sgd", plain=True)
    found["plain trainer"] = rank_trainer.trained(rank, "fsdp2", f"{folder}/plain", plain=True)
    found["refused"] = refused()
    found["monitored"] = monitor_loops.monitored_ranks(rank)
    with pytest.raises(UnsupportedError) as error:
        loops.lightning(rank, "fsdp2", "sgd", mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    found["refused lightning"] = str(error.value)
    return found


def refused() -> list[str]:
    """What is said about ranks that Accelerate would leave alone, FSDP1, and a mixed precision of another policy."""
    from polyamp_torch.accelerate import Accelerator

    def prepared(options: dict[str, Any]) -> None:
        plugin = FullyShardedDataParallelPlugin(**options) if options else None
        made = Accelerator("mixed_float16", cpu=bool(options), fsdp_plugin=plugin)
        net = loops.Net()
        made.prepare(net, loops.optimizer_of(net.parameters(), "sgd"))

    said = []
    for options in ({}, {"fsdp_version": 1}, {"fsdp_version": 2, "mixed_precision_policy": "bf16"}):
        with loops.fresh(), pytest.raises(UnsupportedError) as error:
            prepared(options)
        said.append(str(error.value))
    return said


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return ranks.run(everything, 2, str(tmp_path_factory.mktemp("ranks")), timeout=240.0)


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_s09_s12_ranks_skip_together_with_the_numbers_of_a_loop_by_hand(
    found: Found, library: str, engine: str
) -> None:
    """One rank overflows in turn, in the first or in the last micro-batch of a window; bit for bit, after each one."""
    name, kind = f"{library} {engine}", "DTensor" if engine == "fsdp2" else "Parameter"
    for rank in found:
        seen, hand = rank[name], rank[f"hand {engine}"]
        assert [window[:2] for window in seen.windows] == list(zip(SKIPPED, SCALES, strict=True))
        assert (seen.dtype, seen.kind) == (torch.float16, kind)
        assert same(seen.weights, hand.weights)
    assert same(found[0][name].weights, found[1][name].weights)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_s12_s13_schedules_and_running_statistics_stay_on_every_rank(found: Found, library: str, engine: str) -> None:
    for rank in found:
        assert rank[f"{library} {engine}"].windows == rank[f"hand {engine}"].windows or library == "fabric"
    rate = found[0][f"hand {engine}"].windows[0][2]
    rates = [rate, rate, rate / 2, rate / 2, rate / 4, rate / 8]
    assert [window[2:] for window in found[1][f"{library} {engine}"].windows] == [
        (pytest.approx(rate), passes) for rate, passes in zip(rates, (2, 2, 4, 4, 6, 8), strict=True)
    ]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("library", ["lightning", "accelerate"])
def test_s22_a_checkpoint_of_two_ranks_goes_on_as_if_nothing_had_been(found: Found, library: str, engine: str) -> None:
    """Loading has optimizers make their state by a step of their own, which is no step of the scaler's."""
    for rank in found:
        straight = rank[f"{library} {engine}"]
        resumed = straight.more["resumed"]
        half = loops.WINDOWS // 2
        assert [window[:3] for window in resumed.windows] == [window[:3] for window in straight.windows[half:]]
        assert same(resumed.weights, straight.weights[half:])


def test_s13_trap_an_average_of_weights_and_a_schedule_move_on_a_skipped_step(found: Found) -> None:
    for rank in found:
        plain, ours = rank["plain lightning"], rank["lightning ddp"]
        assert [window[0] for window in plain.windows] == SKIPPED
        assert plain.more["averaged"] == [1, 2, 3, 4, 5, 6]
        assert ours.more["averaged"] == [1, 1, 2, 2, 3, 4]
        assert ours.more["resumed"].more["averaged"] == [2, 3, 4]
        assert plain.windows[-1][2] == pytest.approx(0.1 / 2**6)
        assert ours.windows[-1][2] == pytest.approx(0.1 / 2**4)


def test_s09_a_tensor_parallel_plan_is_clipped_by_one_norm_and_skips_on_both_ranks(found: Found) -> None:
    """Beside gradients that are divided there are whole ones, of the batch norm."""
    for rank in found:
        seen, one = rank["lightning tensor"], rank["hand one"]
        assert seen.kind == "DTensor"
        assert seen.windows == one.windows
        for ours, whole in zip(seen.weights, one.weights, strict=True):
            np.testing.assert_allclose(ours, whole, rtol=1e-5, atol=1e-6)
    assert same(found[0]["lightning tensor"].weights, found[1]["lightning tensor"].weights)


@pytest.mark.parametrize(("library", "engine", "policy"), monitor_loops.RANK_LOOPS)
def test_s35_a_monitor_has_the_figures_of_one_process(found: Found, library: str, engine: str, policy: str) -> None:
    one = monitor_loops.expected(policy, bad=monitor_loops.bad_batch(policy))
    first, second = (rank["monitored"][library, engine, policy] for rank in found)
    monitor_loops.assert_alike(first, one)
    assert repr(first) == repr(second), "NaN of a skipped step is not equal to itself"


def test_lightning_refuses_units_in_another_precision_before_the_first_step(found: Found) -> None:
    for rank in found:
        assert "was sharded with a MixedPrecisionPolicy that contradicts" in rank["refused lightning"]
        assert "param_dtype" in rank["refused lightning"]


def test_trap_accelerate_drops_fsdp2_and_float16_on_the_cpu_without_a_word(found: Found) -> None:
    for rank in found:
        plain, ours = rank["plain accelerate"], rank["accelerate fsdp2"]
        assert (plain.more["engine"], plain.kind) == ("DistributedType.MULTI_CPU", "Parameter")
        assert plain.dtype == torch.float32
        assert np.isnan(plain.weights[-1]).all(), "there is no scaler either"
        assert (ours.more["engine"], ours.kind) == ("DistributedType.FSDP", "DTensor")
        alone, first, second = rank["refused"]
        if not torch.cuda.is_available():
            assert "2 processes were launched, but Accelerate found no accelerators" in alone
        assert "version 1. Pass FullyShardedDataParallelPlugin(fsdp_version=2)" in first
        assert "'0/weight' was sharded with a MixedPrecisionPolicy that contradicts" in second


def test_gradient_norms_are_those_of_the_whole_model_before_clipping(found: Found) -> None:
    for engine in ENGINES:
        first, second = (rank[f"accelerate {engine}"].more["norms"] for rank in found)
        assert first == pytest.approx(second, nan_ok=True)
        assert first[0] == pytest.approx(1.927010, rel=1e-5), "unscaled, of both ranks' halves"
        assert [not np.isfinite(norm) for norm in first] == SKIPPED


@pytest.mark.parametrize("engine", ENGINES)
def test_s09_transformers_trainer_trains_in_float16(found: Found, engine: str) -> None:
    word = {"ddp": "DistributedType.MULTI_CPU", "fsdp2": "DistributedType.FSDP"}[engine]
    for rank in found:
        seen, resumed = rank[f"trainer {engine}"], rank[f"trainer {engine} resumed"]
        assert (seen.dtype, seen.engine) == (torch.float16, word)
        assert seen.steps == [(False, 16.0, 0.0075), (True, 8.0, 0.0075), (False, 8.0, 0.005), (False, 8.0, 0.0025)]
        assert np.array_equal(seen.weights[0], seen.weights[1])
        assert resumed.steps == seen.steps[3:]
        assert same(resumed.weights, seen.weights[3:])
    assert same(found[0][f"trainer {engine}"].weights, found[1][f"trainer {engine}"].weights)
    norms = found[0][f"trainer {engine}"].norms
    assert norms[:1] + norms[2:] == pytest.approx([0.836, 0.754, 0.667], abs=1e-3), "logged without clipping, unscaled"
    assert np.isnan(norms[1])


def test_trap_transformers_trainer_on_the_cpu_has_no_scaler_no_float16_and_no_shards(found: Found) -> None:
    for rank in found:
        plain = rank["plain trainer"]
        assert (plain.dtype, plain.engine) == (torch.float32, "DistributedType.MULTI_CPU")
        assert [step[0] for step in plain.steps] == [False] * 4
        assert np.isnan(plain.weights[-1]).all()
        assert plain.steps[-1][2] == 0.0, "the schedule has run to its end"
