"""transformers: `Trainer` runs of small random models in bfloat16 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import Trainer, TrainingArguments

SIZES: dict[str, Any] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 40},
    "llama": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40,
    },
}  # fmt: skip


def data(count: int = 16) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 40, (count, 12), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer(name: str, folder: Path, **options: Any) -> Trainer:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SIZES[name], bos_token_id=0, eos_token_id=0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    settings: Any = {"max_steps": 12, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1}
    settings |= {"bf16": True, "use_cpu": True, "report_to": [], "disable_tqdm": True, "lr_scheduler_type": "constant"}
    arguments = TrainingArguments(str(folder), **{**settings, "save_strategy": "no", **options})
    return Trainer(model, arguments, train_dataset=data(), eval_dataset=data(4))


def losses(run: Trainer) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


@pytest.mark.parametrize("name", sorted(SIZES))
@pytest.mark.parametrize(
    "options",
    [
        {}, {"gradient_accumulation_steps": 2}, {"gradient_checkpointing": True}, {"max_grad_norm": 0.1},
        {"optim": "adafactor"}, {"label_smoothing_factor": 0.1}, {"optim": "sgd", "learning_rate": 0.5},
    ],
    ids=["plain", "accumulation", "checkpointing", "clipping", "adafactor", "smoothing", "sgd"],
)  # fmt: skip
def test_loss_falls(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    run = trainer(name, tmp_path, **options)
    run.train()
    found = losses(run)
    assert len(found) == 12
    assert found[-1] < found[0]


def test_masters_are_float32(tmp_path: Path) -> None:
    run = trainer("gpt2", tmp_path)
    run.train()
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", sorted(SIZES))
def test_products_run_in_bfloat16(name: str, tmp_path: Path) -> None:
    run = trainer(name, tmp_path, max_steps=1)
    found = []
    run.model.lm_head.register_forward_hook(lambda module, inputs, output: found.append(output.dtype))
    run.train()
    assert set(found) == {torch.bfloat16}


def test_evaluate_and_predict(tmp_path: Path) -> None:
    run = trainer("gpt2", tmp_path)
    run.train()
    assert 0 < run.evaluate()["eval_loss"] < 4
    assert run.predict(data(4)).predictions.shape == (4, 12, 40)


def test_resume_from_checkpoint(tmp_path: Path) -> None:
    whole = trainer("gpt2", tmp_path / "whole", max_steps=8)
    whole.train()
    first = trainer("gpt2", tmp_path / "first", max_steps=8, save_strategy="steps", save_steps=4)
    first.train()
    second = trainer("gpt2", tmp_path / "second", max_steps=8)
    second.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-4"))
    assert losses(second)[-4:] == losses(whole)[-4:]
