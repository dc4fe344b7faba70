"""`Recipe.from_dialect`: blocks of four libraries, what becomes of every key, and the pages about them."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import polyamp
from polyamp import schedules
from polyamp.errors import ArgumentError, RecipeError
from polyamp.recipe.dialects.dialect_report import DIALECTS, dialect_report
from tests.core.recipe.dialect_tables import table_text

DOCS = Path(__file__).parents[3] / "docs"
GUIDE = (DOCS / "guides" / "dialects.md").read_text(encoding="utf-8")
KEYS = (DOCS / "reference" / "dialect_keys.md").read_text(encoding="utf-8")
read: Callable[..., polyamp.Recipe] = polyamp.Recipe.from_dialect
NO_DECAY = (polyamp.Group(kind=("bias", "norm"), weight_decay=0.0),)


def rates(recipe: polyamp.Recipe, count: int) -> list[float]:
    rate = recipe.optimizer.learning_rate
    return [rate(number) if schedules.is_schedule(rate) else rate for number in range(count)]


def test_the_guides_blocks_print_what_stands_below_them(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {}
    for code, printed in re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", GUIDE, re.DOTALL):
        exec(code, scope)
        assert capsys.readouterr().out == printed


@pytest.mark.parametrize("name", DIALECTS)
def test_the_references_tables_are_those_of_the_code(name: str) -> None:
    table = DIALECTS[name][0]
    assert f"## {table.library}\n\n{table_text(table)}" in KEYS + "\n"
    assert len(table.keys) == len(set(table.keys))  # no key is in two places


@pytest.mark.parametrize(
    ("block", "recipe"),
    [
        (
            {},
            polyamp.Recipe(
                optimizer=polyamp.adamw(schedules.linear(5e-5, 0, 100), weight_decay=0.0), clip_norm=1.0, clip_eps=1e-6
            ),
        ),
        (
            {
                "learning_rate": 2e-5, "weight_decay": 0.01, "adam_beta2": 0.98, "adam_epsilon": 1e-6, "fp16": True,
                "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.1, "gradient_accumulation_steps": 4,
                "max_grad_norm": 0.5, "optim": "adamw_torch_fused", "seed": 7, "tf32": True,
            },
            polyamp.Recipe(
                policy=polyamp.Policy("mixed_float16").replace(float32_matmul="high"),
                scaler="torch",
                optimizer=polyamp.adamw(
                    schedules.linear_warmup(2e-5, 10), betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01, groups=NO_DECAY
                ),
                clip_norm=0.5,
                clip_eps=1e-6,
                accumulate_steps=4,
            ),
        ),
        (
            {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "bf16": True, "adam_beta1": 0.8},
            polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.sgd(5e-5)),
        ),
        (
            {"optim": "lion_32bit", "adam_beta2": 0.99, "lr_scheduler_type": "inverse_sqrt", "warmup_ratio": 0.05},
            polyamp.Recipe(
                optimizer=polyamp.lion(schedules.inverse_sqrt(5e-5, 5, 5), weight_decay=0.0),
                clip_norm=1.0,
                clip_eps=1e-6,
            ),
        ),
    ],
)  # fmt: skip
def test_transformers_blocks(block: dict[str, Any], recipe: polyamp.Recipe) -> None:
    assert read("transformers", block, total_steps=100) == recipe


def test_a_transformers_block_counts_its_updates_itself() -> None:
    assert read("transformers", {"max_steps": 40}).optimizer.learning_rate.total_steps == 40
    epochs = read("transformers", {"num_train_epochs": 1.5}, updates_per_epoch=7)
    assert epochs.optimizer.learning_rate.total_steps == 11  # rounded up, as transformers does
    with pytest.raises(
        RecipeError, match=r"lr_scheduler_type='linear' needs the number of updates.*total_steps=\.\.\."
    ):
        read("transformers", {})
    with pytest.raises(RecipeError, match="bf16 and fp16 are two precisions"):
        read("transformers", {"bf16": True, "fp16": True}, total_steps=10)


def test_a_key_that_matters_and_is_not_mapped_is_an_error_that_names_it() -> None:
    block = {"optim": "adafactor", "label_smoothing_factor": 0.1, "neftune_noise_alpha": None, "max_steps": 10}
    with pytest.raises(RecipeError) as caught:
        read("transformers", block)
    assert "optim: 'adafactor' is not among the optimizers of this dialect; it would be AdamW." in str(caught.value)
    assert "label_smoothing_factor: of the loss" in str(caught.value)
    assert "leave_out=['label_smoothing_factor', 'optim']" in str(caught.value)
    assert "neftune" not in str(caught.value)
    assert read("transformers", block, leave_out=["optim", "label_smoothing_factor"]).optimizer.tag == "adamw"
    with pytest.raises(ArgumentError, match=r"Received: 'seed'\. Not mapped are: label_smoothing_factor, optim\."):
        read("transformers", block, leave_out=["seed"])


def test_an_unknown_key_is_never_silent() -> None:
    with pytest.raises(RecipeError, match=r"weigth_decay: no key that polyamp knows of.*Did you mean 'weight_decay'"):
        read("transformers", {"weigth_decay": 0.1, "max_steps": 10})
    with pytest.raises(RecipeError, match=r"optimizer\.params\.warmup: no key that polyamp knows"):
        read("deepspeed", {"optimizer": {"type": "Adam", "params": {"warmup": 3}}})


def test_every_key_of_a_block_is_in_one_place() -> None:
    block = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "betas": [0.9, 0.9], "dampening": 0.5}},
             "zero_optimization": {"stage": 2, "overlap_comm": True}, "steps_per_print": 1}  # fmt: skip
    report = dialect_report("deepspeed", block)
    assert set(report.mapped) == {"optimizer.type", "optimizer.params.lr"}
    assert report.unmapped == {"optimizer.params.dampening": "polyamp's SGD has no dampening."}
    assert report.outside == {
        "optimizer.params.betas": "no effect beside the other keys",
        "zero_optimization.stage": "no effect beside the other keys",
        "zero_optimization.overlap_comm": "not of a recipe",
        "steps_per_print": "not of a recipe",
    }


@pytest.mark.parametrize(
    ("block", "error", "message"),
    [
        ("args.json", ArgumentError, r"block must be DeepSpeed's configuration as a dictionary, or the object"),
        ({"gradient_clipping": "auto"}, RecipeError, r"'gradient_clipping' is 'auto', which another library fills in"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, RecipeError, "exclude each other"),
        ({"bf16": {"enabled": True}}, RecipeError, "optimizer.type: the block has no optimizer"),
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam"}},
            RecipeError,
            "write gradient_accumulation_steps",
        ),
    ],
)
def test_impossible_deepspeed_blocks(block: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read("deepspeed", block)


def test_auto_is_an_error_only_where_it_is_read() -> None:
    block: dict[str, Any] = {"optimizer": {"type": "Adam"}, "zero_optimization": {"reduce_bucket_size": "auto"}}
    assert read("deepspeed", block | {"scheduler": {"params": {"warmup_min_lr": "auto"}}}).optimizer == polyamp.adamw(
        weight_decay=0.0
    )
    with pytest.raises(RecipeError, match=r"'optimizer\.params\.lr' is 'auto', which another library fills in"):
        read("deepspeed", {"optimizer": {"type": "Adam", "params": {"lr": "auto"}}})


def test_an_unknown_dialect() -> None:
    with pytest.raises(
        RecipeError, match=r"must be one of transformers, timm, deepspeed, torchtitan.*Did you mean 'timm'"
    ):
        read("tim", {})
    with pytest.raises(RecipeError, match=r"total_steps must be an integer of at least 1\. Received: total_steps=0"):
        read("timm", {}, total_steps=0)


def test_deepspeeds_precision_and_scaler() -> None:
    adam: dict[str, Any] = {"optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}}}
    fp16 = {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 3, "min_loss_scale": 2}
    recipe = read("deepspeed", adam | {"fp16": fp16, "zero_optimization": {"stage": 1}, "gradient_clipping": 0.3})
    scaler = polyamp.LossScaler.like("deepspeed", init_scale=4096.0, growth_interval=500, hysteresis=3, min_scale=2.0)
    policy = polyamp.Policy(compute="float16", output="float16", mode="cast")
    optimizer = polyamp.adamw(1e-4, betas=(0.9, 0.95), weight_decay=0.0)  # its Adam is AdamW unless told otherwise
    assert recipe == polyamp.Recipe(policy=policy, scaler=scaler, optimizer=optimizer, clip_norm=0.3, clip_eps=1e-6)
    assert read("deepspeed", adam | {"fp16": fp16}).loss_scaler.hysteresis == 1
    static = read("deepspeed", adam | {"fp16": {"enabled": True, "loss_scale": 128}})
    assert static.scaler == polyamp.LossScaler.static(128.0)
    for name in ("bf16", "bfloat16"):
        bf16 = read("deepspeed", adam | {name: {"enabled": True}, "gradient_clipping": 0})
        assert (bf16.policy.compute, bf16.policy.mode, bf16.clip_norm) == ("bfloat16", "cast", None)
        assert bf16.scaler == polyamp.LossScaler.off(check_finite=True)
    l2 = read("deepspeed", {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}})
    assert l2.optimizer == polyamp.adam(1e-3, weight_decay=0.1)
    torch_adam = read("deepspeed", {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}})
    assert torch_adam.optimizer == polyamp.adamw()


def deepspeed_rate(kind: str, count: int, params: dict[str, Any]) -> float:
    """The formula of DeepSpeed's lr_schedules.py, whose counter starts at -1."""
    last, warmup, total = count - 1, params["warmup_num_steps"], params.get("total_num_steps", 0)
    if kind == "WarmupCosineLR":
        low, bottom = params["warmup_min_ratio"], params["cos_min_ratio"]
        if last < 0:
            return 0.0
        if last < warmup:
            return 2e-3 * (low + (1.0 - low) * last / warmup)
        progress = min(1.0, (last - warmup + 1) / (total - warmup))
        return 2e-3 * (bottom + (1.0 - bottom) * (1.0 + math.cos(math.pi * progress)) / 2.0)
    peak, start = params.get("warmup_max_lr", 2e-3 if kind == "WarmupLR" else 1e-3), params["warmup_min_lr"]
    if last < warmup:
        return start + (peak - start) * max(last, 0) / warmup
    share = 1.0 if kind == "WarmupLR" else max(0.0, (total - last) / (total - warmup))
    return start + (peak - start) * share


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("WarmupLR", {"warmup_num_steps": 10, "warmup_min_lr": 1e-5}),
        ("WarmupLR", {"warmup_num_steps": 10, "warmup_min_lr": 0.0, "warmup_max_lr": 0.01}),
        ("WarmupDecayLR", {"warmup_num_steps": 10, "warmup_min_lr": 1e-5, "total_num_steps": 40}),
        (
            "WarmupCosineLR",
            {"warmup_num_steps": 10, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.01, "total_num_steps": 40},
        ),
    ],
)
def test_deepspeeds_schedules(kind: str, params: dict[str, Any]) -> None:
    scheduler = {"type": kind, "params": {**params, "warmup_type": "linear"}}
    recipe = read("deepspeed", {"optimizer": {"type": "AdamW", "params": {"lr": 2e-3}}, "scheduler": scheduler})
    assert rates(recipe, 50) == pytest.approx([deepspeed_rate(kind, count, params) for count in range(50)], abs=1e-12)


def test_deepspeeds_logarithmic_warmup_is_refused() -> None:
    block = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}
    with pytest.raises(RecipeError, match=r"scheduler\.params\.warmup_type: a warmup by a logarithm"):
        read("deepspeed", block)
    with pytest.raises(RecipeError, match=r"scheduler\.type: 'OneCycle' is no schedule of polyamp's"):
        read("deepspeed", {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "OneCycle"}})


def torchtitan_factor(
    count: int, warmup: int, decay: int, total: int, shape: Callable[[float], float], low: float
) -> float:
    stable = total + 1 - warmup - decay
    if count < warmup:
        return (count + 1) / warmup
    if count < warmup + stable:
        return 1.0
    return low + (1.0 - low) * shape((count + 1 - warmup - stable) / decay)


@pytest.mark.parametrize(
    ("scheduler", "decay", "shape"),
    [
        ({"warmup_steps": 10}, 40, lambda share: 1.0 - share),
        ({"warmup_steps": 10, "decay_ratio": 0.3, "decay_type": "sqrt", "min_lr_factor": 0.1}, 15,
         lambda share: 1.0 - math.sqrt(share)),
        ({"warmup_steps": 0, "decay_type": "cosine", "lr_min": 0.2}, 50,
         lambda share: (1 + math.cos(math.pi * share)) / 2),
        ({"warmup_steps": 60}, 0, None),
    ],
)  # fmt: skip
def test_torchtitans_schedules(scheduler: dict[str, Any], decay: int, shape: Any) -> None:
    low = scheduler.get("min_lr_factor", scheduler.get("lr_min", 0.0))
    warmup = min(scheduler["warmup_steps"], 50)
    recipe = read("torchtitan", {"training": {"steps": 50}, "lr_scheduler": scheduler, "optimizer": {"lr": 1e-3}})
    expected = [1e-3 * torchtitan_factor(count, warmup, decay, 50, shape, low) for count in range(50)]
    assert rates(recipe, 50) == pytest.approx(expected, abs=1e-12)


def test_torchtitans_blocks() -> None:
    block = {
        "job": {"dump_folder": "out"},
        "model": {"name": "llama3", "flavor": "8B", "converters": []},
        "optimizer": {"name": "AdamW", "lr": 3e-4, "eps": 1e-8, "implementation": "fused"},
        "lr_scheduler": {"warmup_steps": 200},
        "training": {"local_batch_size": 1, "seq_len": 8192, "max_norm": 1.0, "steps": 1000},
        "parallelism": {"data_parallel_shard_degree": -1},
    }
    recipe = read("torchtitan", block)
    rate = schedules.wsd(3e-4, 199, 1000, 800, shape="linear", origin=-1)
    assert recipe == polyamp.Recipe(
        policy="mixed_bfloat16",
        optimizer=polyamp.adamw(rate, betas=(0.9, 0.95), weight_decay=0.1),
        clip_norm=1.0,
        clip_eps=1e-6,
    )
    with pytest.raises(RecipeError, match=r"model\.converters: float8 and other converters are of the model"):
        read("torchtitan", block | {"model": {"converters": ["float8"]}})
    with pytest.raises(RecipeError, match=r"training\.global_batch_size: the micro-batches of an update follow"):
        read("torchtitan", {"training": {"global_batch_size": 64}})


def test_torchtitans_parameter_groups() -> None:
    kwargs = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0}
    everything = {"pattern": ".*", "optimizer_name": "AdamW", "optimizer_kwargs": kwargs}
    recipe = read("torchtitan", {"optimizer": {"param_groups": [everything]}})
    assert (recipe.optimizer.betas, recipe.optimizer.weight_decay) == ((0.9, 0.95), 0.0)
    biases = {"pattern": r"\.bias$", "optimizer_name": "AdamW", "optimizer_kwargs": kwargs}
    with pytest.raises(RecipeError, match="patterns over torch's parameter names have no counterpart"):
        read("torchtitan", {"optimizer": {"param_groups": [biases, everything]}})
    muon = {"pattern": ".*", "optimizer_name": "Muon", "optimizer_kwargs": {"lr": 1e-3}}
    with pytest.raises(RecipeError, match="'Muon' is not among the optimizers of this dialect"):
        read("torchtitan", {"optimizer": {"param_groups": [muon]}})


def test_timms_arguments() -> None:
    block = argparse.Namespace(
        opt="adamw", lr=1e-3, weight_decay=0.05, clip_grad=1.0, amp=True, amp_dtype="bfloat16", sched="cosine",
        sched_on_updates=True, epochs=10, warmup_epochs=2, warmup_lr=1e-6, min_lr=1e-5, model_ema=True,
        model_ema_decay=0.999, grad_accum_steps=2, smoothing=0.0, mixup=0.8,
    )  # fmt: skip
    rate = schedules.join(
        [schedules.linear_warmup(1e-3, 10, 1e-6), schedules.cosine(1e-3, 40, 1e-5, origin=-10)], (10,)
    )
    groups = (polyamp.Group(kind=("bias", "vector"), weight_decay=0.0),)
    assert read("timm", block, updates_per_epoch=5) == polyamp.Recipe(
        policy="mixed_bfloat16",
        optimizer=polyamp.adamw(rate, weight_decay=0.05, groups=groups),
        clip_norm=1.0,
        clip_eps=1e-6,
        accumulate_steps=2,
        ema=polyamp.Ema(decay=0.999, statistics="average"),
    )
    plain = {"--lr": 0.1, "--clip-grad": 0.02, "--clip-mode": "value", "--weight-decay": 0.0, "--warmup-epochs": 0}
    recipe = read("timm", {**plain, "--epochs": 4}, updates_per_epoch=2)
    halves = [0.5 * (1 + math.cos(math.pi * epoch / 4)) * 0.1 for epoch in range(5)]
    steps = schedules.piecewise(tuple(halves), (2, 4, 6, 8))
    assert rates(recipe, 9) == pytest.approx([steps(count) for count in range(9)], abs=1e-12)
    assert (recipe.clip_value, recipe.clip_norm) == (0.02, None)
    assert (recipe.optimizer.momentum, recipe.optimizer.nesterov, recipe.optimizer.groups) == (0.9, True, ())


def timm_rate(epoch: int, kind: str, prefix: bool) -> float:
    """The formulas of timm's schedulers at lr=0.01, 20 epochs, 4 of them of warmup from 1e-4."""
    if epoch < 4:
        return 1e-4 + epoch * (0.01 - 1e-4) / 4
    epoch -= 4 if prefix else 0
    share = min(epoch / 20, 1.0)
    return {
        "cosine": 1e-6 + 0.5 * (0.01 - 1e-6) * (1 + math.cos(math.pi * share)),
        "poly": 1e-6 + (0.01 - 1e-6) * (1 - share) ** 0.9,
        "step": 0.01 * 0.9 ** (epoch // 7.5),
        "multistep": 0.01 * 0.9 ** ((epoch + 1 >= 6) + (epoch + 1 >= 12)),
    }[kind]


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("kind", ["cosine", "poly", "step", "multistep"])
def test_timms_schedules_by_epoch(kind: str, prefix: bool) -> None:
    block = {"lr": 0.01, "sched": kind, "epochs": 20, "warmup_epochs": 4, "warmup_lr": 1e-4, "min_lr": 1e-6,
             "warmup_prefix": prefix, "decay_rate": 0.9, "decay_epochs": 7.5, "decay_milestones": [6, 12]}  # fmt: skip
    expected = [timm_rate(count // 3, kind, prefix) for count in range(3 * (24 if prefix else 20))]
    recipe = read("timm", block, updates_per_epoch=3)
    assert rates(recipe, len(expected)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({}, r"without lr timm computes the rate from lr_base.*Write lr\."),
        ({"lr": 0.1}, r"count epochs\. Pass updates_per_epoch=\.\.\."),
        ({"lr": 0.1, "sched": "tanh"}, r"sched: 'tanh' is no schedule of polyamp's"),
        ({"lr": 0.1, "sched": "none", "clip_grad": 0.01, "clip_mode": "agc"}, r"clip_mode: 'agc'"),
        ({"lr": 0.1, "layer_decay": 0.75, "sched": "tanh"}, r"layer_decay: depends on the model's layers"),
        ({"lr": 0.1, "opt": "lamb", "sched": "tanh"}, r"opt: 'lamb' is not among the optimizers of this dialect"),
        ({"lr": 0.1, "model_ema": True, "model_ema_warmup": True, "sched": "x"}, r"model_ema_warmup: timm's early"),
    ],
)
def test_what_timms_arguments_cannot_say(block: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        read("timm", block)


@pytest.mark.parametrize("name", DIALECTS)
def test_a_recipe_of_a_dialect_has_a_file_format(name: str) -> None:
    block: dict[str, Any] = {"timm": {"lr": 0.1}, "deepspeed": {"optimizer": {"type": "Adam"}}}.get(name, {})
    recipe = read(name, block, total_steps=600)
    assert polyamp.Recipe.from_toml(recipe.to_toml()) == recipe
