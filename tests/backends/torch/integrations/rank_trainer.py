"""transformers' `Trainer` in each of two processes, with a tiny model made from its configuration.

`test_adapter_ranks` calls it; a gradient of rank 1 overflows in the second of four steps.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch

import polyamp
from tests.backends.torch.integrations.rank_loops import INF, Weights, fresh, whole

SCALER = polyamp.LossScaler(init_scale=16.0, growth_interval=100, on_stuck="ignore")
VOCABULARY, LENGTH = 17, 8


class Trained(NamedTuple):
    """What a training left behind.

    Attributes:
        steps: after each step whether it was skipped, the scale, and the next rate.
        norms: of the gradients before clipping, as they are logged.
        weights: one parameter, whole, after each step.
        dtype: of the logits.
        engine: Accelerate's word.
    """

    steps: list[tuple[bool, float, float]]
    norms: list[float]
    weights: list[Weights]
    dtype: torch.dtype
    engine: str


def trained(rank: int, engine: str, folder: str, *, plain: bool = False, resume: bool = False) -> Trained:
    """Four steps with float16, or the last of them from a checkpoint.

    Args:
        rank: of this process.
        engine: "ddp" or "fsdp2".
        folder: for checkpoints.
        plain: with the `Accelerator` that transformers brings.
        resume: from the checkpoint after the third step.
    """
    import transformers
    from transformers import trainer as module

    from polyamp_torch.accelerate import Accelerator

    class Overflowing(transformers.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            return loss * INF if self.state.global_step == 1 and rank == 1 else loss

    class Note(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            made = trainer.accelerator
            scale = made.scaler.get_scale() if made.scaler is not None else 1.0
            steps.append((made.optimizer_step_was_skipped, scale, given["lr_scheduler"].get_last_lr()[0]))
            weights.append(whole(given["model"].transformer.h[0].mlp.c_fc.weight).numpy())

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            norms.extend([logs["grad_norm"]] if "grad_norm" in logs else [])

    steps: list[tuple[bool, float, float]] = []
    norms: list[float] = []
    weights: list[Weights] = []
    dtypes: list[torch.dtype] = []
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with fresh():
        their = module.Accelerator
        if not plain:
            module.Accelerator = functools.partial(Accelerator, scaler=SCALER)
        try:
            torch.manual_seed(0)
            config = transformers.GPT2Config(
                vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0,
                embd_pdrop=0.0, attn_pdrop=0.0,
            )  # fmt: skip
            model = transformers.GPT2LMHeadModel(config)
            model.lm_head.register_forward_hook(lambda _, args, output: dtypes.append(output.dtype))
            arguments = transformers.TrainingArguments(
                output_dir=str(Path(folder) / engine), fp16=True, use_cpu=True, per_device_train_batch_size=2,
                max_steps=4, logging_steps=1, save_steps=3, report_to=[], disable_tqdm=True, learning_rate=1e-2,
                max_grad_norm=0.0, lr_scheduler_type="linear", seed=1, fsdp=engine == "fsdp2" or None,
            )  # fmt: skip
            trainer = Overflowing(model=model, args=arguments, train_dataset=rows(), callbacks=[Note()])
            trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
            trainer.train(resume_from_checkpoint=str(Path(folder) / engine / "checkpoint-3") if resume else None)
        finally:
            module.Accelerator = their
        return Trained(steps, norms, weights, dtypes[0], str(trainer.accelerator.distributed_type))


def rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(0, VOCABULARY, (LENGTH,), generator=generator) for _ in range(24)]
    return [{"input_ids": one, "labels": one} for one in drawn]
