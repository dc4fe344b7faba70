"""A fixed small number of random networks agree in every framework, and planted faults do not go unseen.

One process per framework is used for all of it. `make fuzz` runs more seeds, see `__main__`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.fuzz import plants, problem
from tests.fuzz.__main__ import program, report
from tests.fuzz.build_reference import can
from tests.fuzz.compare import CUT_OFF, as_one_batch, findings, one_batch
from tests.fuzz.grammar import ACTIVATIONS, FEATURES, SENSITIVE, Description, describe, walk
from tests.fuzz.judge import judged, narrow_sensitivity
from tests.fuzz.minimise import candidates, kind, smallest
from tests.fuzz.pool import Pool
from tests.fuzz.worker import Record, decode, encode

SEEDS = range(20)
COMPILED = (3,)
"""Seeds whose graph TensorFlow traces, and whose float32 baseline every framework trains."""


class Trained(NamedTuple):
    """What the frameworks made of one seed."""

    description: Description
    records: dict[str, Record]
    baselines: dict[str, Record]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(together=True) as pool:
        yield pool


@pytest.fixture(scope="module")
def trained(pool: Pool) -> list[Trained]:
    made: list[Trained] = []
    for seed in SEEDS:
        description = describe(seed)
        seldom = seed in COMPILED
        made.append(Trained(description, *pool.train(description, compiled=seldom, every_baseline=seldom)))
    return made


def test_the_frameworks_agree_on_every_seed(trained: list[Trained], pool: Pool) -> None:
    found = {
        item.description["seed"]: judged(item.description, findings(*item) + pool.whole(*item), pool)
        for item in trained
    }
    assert {seed: texts for seed, texts in found.items() if texts} == {}
    assert {name for item in trained for name in item.records} == {"reference", "torch", "tensorflow", "jax"}


@pytest.mark.parametrize("plant", plants.PLANTS)
def test_a_planted_fault_is_found(plant: str, trained: list[Trained], pool: Pool) -> None:
    """In torch, the quickest; the others' records are those of the test above."""
    worker = pool.workers["torch"]
    for item in trained:
        if not plants.matters(plant, item.description):
            continue
        worker.submit({"description": item.description, "policy": None, "compile": None, "plant": plant})
        faulty = {**item.records, "torch": worker.result()}
        assert "error" not in faulty["torch"], "the fault is to train another way, not to raise"
        wide = faulty if item.baselines is item.records else item.baselines
        if findings(item.description, faulty, wide):
            return
    pytest.fail(f"no seed of {SEEDS} shows that {plants.PLANTS[plant]}")


def test_a_worker_that_dies_is_a_finding_and_is_replaced(pool: Pool) -> None:
    worker = pool.workers["reference"]
    mlp = next(describe(seed) for seed in SEEDS if describe(seed)["kind"] == "mlp")
    job: dict[str, Any] = {"description": mlp, "policy": None, "compile": None, "plant": "die"}
    worker.submit(job)
    assert "the process ended with status 7" in worker.result()["error"]
    worker.submit({**job, "plant": None})
    assert "error" not in worker.result()


def test_a_description_is_plain_data_and_the_same_every_time() -> None:
    for seed in range(200):
        assert json.loads(json.dumps(describe(seed))) == json.loads(json.dumps(describe(seed)))


def test_the_grammar_reaches_everything() -> None:
    """Every layer, loss, policy, scaler, optimizer and schedule is among the first seeds, or it is never tested."""
    several = [describe(seed) for seed in range(300)]
    assert {layer["op"] for found in several for layer in walk(found["layers"])} >= {
        "dense", "conv", "layer_norm", "rms_norm", "batch_norm", "group_norm", "attention", "embedding", "positions",
        "rnn", "gru", "residual", "tied", "unused", "detached", "zeroed", "scale", *ACTIVATIONS, *SENSITIVE,
    }  # fmt: skip
    assert {head["loss"] for found in several for head in found["heads"]} >= {"softmax_cross_entropy", "unused"}
    assert any("tied" in head for found in several for head in found["heads"])
    assert {found["optimizer"]["type"] for found in several} == {
        "sgd", "adam", "adamw", "rmsprop", "adagrad", "lion", "nadam", "nadamw", "lamb", "adafactor", "muon",
        "schedule_free",
    }  # fmt: skip
    assert 20 < sum("ema" in found for found in several) < 150
    settings = {name for found in several for group in found["optimizer"].get("groups", ()) for name in group}
    assert settings == {"paths", "clip_norm", "clip_value", "trainable_after", "learning_rate_scale"}
    assert {found["scaler"]["kind"] for found in several} == {"dynamic", "static", "like", "off"}
    rates = [found["optimizer"]["learning_rate"] for found in several]
    assert {rate["type"] for rate in rates if isinstance(rate, dict)} == {
        "constant", "linear_warmup", "cosine", "warmup_cosine", "step", "piecewise", "polynomial", "exponential",
        "restarts", "linear", "wsd", "one_cycle", "inverse_sqrt",
    }  # fmt: skip
    assert {found["accumulate_steps"] for found in several} == {1, 2, 4}
    assert {found["policy"].get("mode") for found in several} == {None, "cast"}
    assert sum(bool(found["overflows"]) for found in several) > 50
    assert sum(bool(found["policy"].get("overrides")) for found in several) > 20


def test_features_are_added_to_a_network_that_is_otherwise_the_same() -> None:
    """Each by itself, to what it fits; and their descriptions are plain data, made small as others are."""
    shown: dict[str, list[Description]] = {name: [] for name in FEATURES}
    for seed in range(200):
        plain = describe(seed, ())
        whole = describe(seed, FEATURES)
        assert json.loads(json.dumps(whole)) == json.loads(json.dumps(describe(seed, FEATURES)))
        for name in FEATURES:
            alone = describe(seed, [name])
            if alone not in (plain, {**plain, "python": False}):
                shown[name].append(alone)
            if name != "regions":  # which put layers into one more list
                assert [layer["op"] for layer in walk(alone["layers"])] == [
                    layer["op"] for layer in walk(plain["layers"])
                ]
    assert min(map(len, shown.values())) > 20
    assert {found["models"]["jax"] for found in shown["writes"]} == {"nnx"}
    assert {found["counts"] for found in shown["counts"]} == {"weight", "returned"}
    assert {found["policy"]["name"] for found in shown["float64"]} == {"float64"}
    assert {found["policy"].get("mode") for found in shown["regions"]} == {None}
    for found in shown["writes"]:
        again = {layer.get("of") for layer in walk(found["layers"])}
        assert not any(layer.get("clamp") and layer["name"] in again for layer in walk(found["layers"]))
    left = [one for found in shown["writes"] for one in candidates(found)]
    assert any(not any("clamp" in layer for layer in walk(one["layers"])) for one in left)


def test_labels_count_unequally_in_a_window_and_some_always_do() -> None:
    """With "counts", whatever the window is later: the one batch that it is compared with has the same labels."""
    shares = set()
    for seed in range(60):
        description = describe(seed, ["counts"])
        single = one_batch(description)
        if single is None:
            continue
        (head,) = description["heads"]
        assert single["accumulate_steps"] == 1
        for batch, again in zip(
            problem.batches({**description, "listed": False}), problem.batches(single), strict=True
        ):
            counted = batch[head["name"]] != -100
            assert counted.any()
            assert (batch[head["name"]] == again[head["name"]]).all()
            parts = [part.sum() for part in np.array_split(counted, description["accumulate_steps"])]
            shares |= {len(set(parts)) > 1, *(["none"] if 0 in parts else [])}
    assert shares == {True, False, "none"}


def test_a_window_that_is_not_one_batch_is_a_finding() -> None:
    record = {"loss": [1.0, 0.5], "grad_norm": [2.0, 1.0]}
    assert as_one_batch(record, {"loss": [1.0, 0.50001], "grad_norm": [2.0, 1.0001]}) == []
    (found,) = as_one_batch(record, {"loss": [1.0, 0.5], "grad_norm": [2.0, 1.1]})
    assert found.startswith("S8: grad_norm is 9.1e-02 from one batch: [2, 1], one batch [2, 1.1]")


def test_arrays_of_float64_are_compared_to_their_own_digits() -> None:
    """Two that differ in the tenth digit are one in float32, and two under a float64 policy."""
    values = np.linspace(0.1, 1.0, 8)
    records = [{"loss": [1.0], "plain": [1.0], "grad_norm": [1.0], "scale": [1.0], "skipped": [0.0], "step": [1.0],
                "scale_state": {}, "running": {}, "parameters": {"w": encode(values * factor)}}
               for factor in (1.0, 1.0 + 1e-9)]  # fmt: skip
    given = dict(zip(("torch", "jax"), records, strict=True))
    base = {**describe(0, ()), "optimizer": {"type": "sgd", "learning_rate": 0.1}, "overflows": []}
    assert decode(records[1]["parameters"]["w"]).dtype == np.float64  # type: ignore[index]  # a record is a dict of Any
    assert findings({**base, "policy": {"name": "float32"}}, given, given) == []
    (found,) = findings({**base, "policy": {"name": "float64"}}, given, given)
    assert found.startswith("float64 parameters w: 8 of 8 elements differ")


def test_a_failure_is_made_small() -> None:
    """A failure that only a convolution and two steps cause is left with little else."""
    big = next(d for d in map(describe, range(300)) if d["kind"] == "image" and len(walk(d["layers"])) > 5)

    def check(description: Description) -> list[str]:
        convolutions = sum(layer["op"] == "conv" for layer in walk(description["layers"]))
        return [f"torch: {convolutions} convolutions"] if convolutions and description["steps"] >= 2 else []

    small, left = smallest(big, check)
    assert left == ["torch: 1 convolutions"]
    assert [layer["op"] for layer in walk(small["layers"])] == ["conv"]
    assert (small["steps"], small["accumulate_steps"], small["policy"]) == (2, 1, {"name": "float32"})
    assert not any(check(candidate) for candidate in candidates(small))


def test_what_a_network_blows_up_by_itself_is_no_finding(pool: Pool) -> None:
    """The same distance is excused where the network has it, and only there."""
    mlp = next(d for d in map(describe, SEEDS) if d["kind"] == "mlp" and d["policy"]["name"] != "float32")
    text = "jax is {} from its float32 at the first steps (grad_norm), another framework only 1.0e-06"
    moved = narrow_sensitivity(mlp, "torch", pool)["grad_norm"]
    assert 0.0 < moved < 0.5
    assert judged(mlp, [text.format(f"{moved:.1e}")], pool) == []
    assert judged(mlp, [text.format(f"{moved * 3:.1e}")], pool) == [text.format(f"{moved * 3:.1e}")]
    exact = ["scale differs: torch [1.0], jax [2.0]", "jax: S12: step 1 was skipped, but these arrays changed: step"]
    assert judged(mlp, exact, pool) == exact


def test_products_that_are_cut_off_explain_a_framework_that_cuts_and_no_other(pool: Pool) -> None:
    """By as much as TensorFlow's curve moved where this was found: 1.5e-02 of two layers of attention."""
    layers = [
        {"op": "attention", "name": f"attention{n}", "heads": 2, "native": False, "causal": False} for n in (0, 1)
    ]
    head = {"name": "head0", "width": 3, "bias": True, "pool": "mean", "loss": "huber", "weight": 1.0, "options": {}}
    described = {
        **describe(0, ()), "seed": 439, "kind": "tokens", "steps": 1, "accumulate_steps": 1, "overflows": [],
        "layers": [{"op": "embedding", "name": "embedding0", "width": 8}, *layers],
        "heads": [{**head, "weighted": False}], "policy": {"name": "mixed_bfloat16"},
    }  # fmt: skip
    cut = narrow_sensitivity(described, "torch", pool, toward_zero=True)["plain"]
    assert cut == pytest.approx(1.58e-2, rel=0.01)
    text = f"tensorflow is {cut:.1e} from its float32 at the first steps (plain), another framework only 1.0e-06"
    assert judged(described, [text], pool) == [text]
    assert judged(described, [text + CUT_OFF], pool) == []
    far = text.replace(f"{cut:.1e}", f"{cut * 3:.1e}") + CUT_OFF
    assert judged(described, [far], pool) == [far]
    records, baselines = pool.train(described)
    found = findings(described, records, baselines)  # none on a processor where TensorFlow rounds
    assert {name: record["cut_off"] for name, record in records.items()} == {
        name: name == "tensorflow" and bool(found) for name in ("torch", "tensorflow", "jax")
    }
    assert all(text.startswith("tensorflow is ") and text.endswith(CUT_OFF) for text in found)
    assert judged(described, found, pool) == []


def test_an_mlp_without_one_of_its_relus_is_not_the_references() -> None:
    described = next(each for each in map(describe, range(500)) if each["kind"] == "mlp" and len(each["layers"]) > 4)
    assert can(described)
    relus = [number for number, layer in enumerate(described["layers"]) if layer["op"] == "relu"]
    for number in relus:
        layers = [layer for place, layer in enumerate(described["layers"]) if place != number]
        assert not can({**described, "layers": layers})
    assert can({**described, "layers": []})


def test_a_printed_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """As it is pasted; with NumPy, which needs no process of its own."""
    mlp = next(describe(seed) for seed in SEEDS if can(describe(seed)))
    exec(program(mlp, "reference"), {})
    assert capsys.readouterr().out.count("'violations': []") == 2
    assert "'torch', 'tensorflow', 'jax'" in program(mlp, "reference")


def test_a_report_names_the_framework_that_fails() -> None:
    text = report(describe(4), ["jax: S23: unused, but these arrays changed: model/unused0/bias"])
    assert "framework = 'jax'" in text
    assert "seed 4" in text


def test_kinds_of_findings_forget_the_numbers() -> None:
    assert kind("scale differs: torch [1, 2], jax [1, 4]") == kind("scale differs: torch [8, 2], jax [8, 4]")
    raised = "torch: RuntimeError: one of the variables {} has been modified"
    assert kind(raised.format("(float32[8])")) == kind(raised.format("(float32[4])"))
    assert kind(raised) != kind("torch: RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x8 and 6x8)")
    assert kind("scale differs: torch [1], jax [2]") != kind("float32 loss is 1.0e-01 apart: torch [1], jax [2]")


def test_arrays_travel_whole() -> None:
    value = np.asarray([[1.0, np.inf, -0.0]], np.float32)
    assert decode(json.loads(json.dumps(encode(value)))).tobytes() == value.tobytes()
