"""Peak memory of `polyamp.losses.chunked_causal_language_model` beside the whole form, in every framework.

    python benchmarks/chunked_loss.py

Each line is a process of its own: value and gradients of one loss, of hidden states and of the head's weight, on the
CPU. The peak is that of the process beyond a step on rows of two tokens (`ru_maxrss`). JAX and TensorFlow are compiled.
It prints the table of docs/measurements/chunked_loss.md, judges nothing and exits with 0. A few minutes.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

ROOT: Final = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[:1] = [str(ROOT), str(ROOT / "backends")]  # this folder's torch/ and jax/ are not the frameworks

ROWS, LENGTH, WIDTH, VOCABULARY = 4, 512, 256, 32000
FORMS: Final = {"whole": None, "8 chunks": 8, "32 chunks": 32}


def problem(length: int) -> tuple[Any, Any, Any]:
    """Hidden states, the head's weight, and tokens."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(ROWS, length, WIDTH)).astype(np.float32)
    weight = rng.normal(0.0, 0.02, (VOCABULARY, WIDTH)).astype(np.float32)
    return hidden, weight, rng.integers(0, VOCABULARY, (ROWS, length))


def torch_step(dtype: str, chunks: int | None) -> Callable[[int], float]:
    """Return a function of the length: one value and its gradients."""
    import torch

    from polyamp import losses

    torch.set_num_threads(1)

    def step(length: int) -> float:
        hidden, weight, tokens = (torch.from_numpy(each) for each in problem(length))
        hidden.requires_grad_()
        weight.requires_grad_()
        if chunks is None:
            narrow = getattr(torch, dtype)
            loss = losses.causal_language_model(hidden.to(narrow) @ weight.to(narrow).T, tokens)
        else:
            loss = losses.chunked_causal_language_model(hidden, weight, tokens, chunks=chunks, dtype=dtype)
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
        return float(loss.detach())

    return step


def jax_step(dtype: str, chunks: int | None) -> Callable[[int], float]:
    """Return a function of the length: one value and its gradients, compiled."""
    import jax

    from polyamp import losses

    def loss(hidden: Any, weight: Any, tokens: Any) -> Any:
        if chunks is None:
            return losses.causal_language_model(hidden.astype(dtype) @ weight.astype(dtype).T, tokens)
        return losses.chunked_causal_language_model(hidden, weight, tokens, chunks=chunks, dtype=dtype)

    made = jax.jit(jax.value_and_grad(loss, (0, 1)))

    def step(length: int) -> float:
        value, _ = jax.block_until_ready(made(*map(jax.numpy.asarray, problem(length))))
        return float(value)

    return step


def tensorflow_step(dtype: str, chunks: int | None) -> Callable[[int], float]:
    """Return a function of the length: one value and its gradients, as a graph."""
    import tensorflow as tf

    from polyamp import losses

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow is untyped
    def made(hidden: Any, weight: Any, tokens: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([hidden, weight])
            if chunks is None:
                logits = tf.matmul(tf.cast(hidden, dtype), tf.cast(weight, dtype), transpose_b=True)
                loss = losses.causal_language_model(logits, tokens)
            else:
                loss = losses.chunked_causal_language_model(hidden, weight, tokens, chunks=chunks, dtype=dtype)
        return loss, tape.gradient(loss, [hidden, weight])

    return lambda length: float(made(*map(tf.constant, problem(length)))[0])


_VARIABLES: Final = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "JAX_PLATFORMS": "cpu",
    "MALLOC_MMAP_THRESHOLD_": "1000000",
}
"""For the measured processes. With the last one the C library gives freed tensors back to the system. Else what it
keeps in pieces is counted too: 474 MB instead of 97 MB for torch's 8 chunks."""
STEPS: Final = {"torch": torch_step, "jax": jax_step, "tensorflow": tensorflow_step}


def peak() -> float:
    """Return the largest memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0


def measure(framework: str, dtype: str, form: str, length: int) -> str:
    """Return the loss, the memory beyond that of a step on short rows, and the seconds, as text."""
    step = STEPS[framework](dtype, FORMS[form])
    step(2)
    before, began = peak(), time.perf_counter()
    loss = step(length)
    return f"{loss:.5f} | {peak() - before:.0f} MB | {time.perf_counter() - began:.1f} s"


def main() -> None:
    """Measure every form in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=3, metavar=("FRAMEWORK", "DTYPE", "FORM"), help="measure this one here")
    parser.add_argument("--quick", action="store_true", help="short rows: only that every line runs")
    parser.add_argument("--dtype", default="float32", help="of the product (default: %(default)s)")
    given = parser.parse_args()
    if given.one is not None:
        print(measure(*given.one, 16 if given.quick else LENGTH))
        return
    megabytes = ROWS * (LENGTH - 1) * VOCABULARY * 4 / 2**20
    print(f"Float32 logits of {ROWS} rows of {LENGTH} tokens, {VOCABULARY} in the vocabulary: {megabytes:.0f} MB\n")
    print("| framework | form | loss | beyond a short step | seconds |\n|---|---|---|---|---|")
    variables = {**os.environ, **_VARIABLES}
    for framework in STEPS:
        for form in FORMS:
            command = [sys.executable, __file__, "--one", framework, given.dtype, form]
            command += ["--quick"] if given.quick else []
            done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
            print(f"| {framework} | {form} | {done.stdout.strip()} |", flush=True)


if __name__ == "__main__":
    main()
