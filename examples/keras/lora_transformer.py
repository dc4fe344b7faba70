"""A small Keras transformer, first trained whole, then by LoRA alone, then quantized to int8.

    KERAS_BACKEND=torch python examples/keras/lora_transformer.py        # or tensorflow, or jax

`enable_lora` freezes a layer's kernel and adds two small ones. The model has other trainable variables then, so that it
is compiled anew. `quantize` is for prediction: polyamp's policy stays on all other layers.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import polyamp
import polyamp_keras

RECIPE = polyamp.Recipe(
    policy="mixed_bfloat16", scaler=polyamp.LossScaler(init_scale=64.0), optimizer=polyamp.adamw(1e-2), clip_norm=1.0
)
LENGTH, VOCABULARY, WIDTH = 8, 16, 32


def transformer() -> Any:
    """A causal block with token embeddings, (batch, length) -> logits (batch, length, vocabulary)."""
    seeds = iter(range(100))

    def dense(units: int, **options: Any) -> Any:
        return keras.layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(next(seeds)), **options)

    tokens = keras.Input((LENGTH,), dtype="int32")
    table = keras.initializers.RandomNormal(stddev=0.5, seed=next(seeds))
    x = keras.layers.Embedding(VOCABULARY, WIDTH, embeddings_initializer=table, name="tokens")(tokens)
    start = keras.initializers.GlorotUniform(next(seeds))
    normed = keras.layers.LayerNormalization(name="norm_1")(x)
    attention = keras.layers.MultiHeadAttention(2, WIDTH // 2, kernel_initializer=start, name="attention")
    x = keras.layers.Add()([x, attention(normed, normed, use_causal_mask=True)])
    hidden = dense(64, activation="gelu", name="up")(keras.layers.LayerNormalization(name="norm_2")(x))
    x = keras.layers.Add()([x, dense(WIDTH, name="down")(hidden)])
    return keras.Model(tokens, dense(VOCABULARY, name="logits")(x))


def sentences(rows: int, step: int) -> tuple[Any, Any]:
    """Token ids that count up by `step`, int32 (rows, length), and the next id of each."""
    start = np.random.default_rng(0).integers(VOCABULARY, size=(rows, 1))
    ids = ((start + step * np.arange(LENGTH + 1)) % VOCABULARY).astype("int32")
    return ids[:, :-1], ids[:, 1:]


def train(model: Any, data: tuple[Any, Any], epochs: int) -> list[float]:
    """Compile by the recipe and fit; return the losses of the epochs."""
    polyamp_keras.compile(model, RECIPE, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    found: list[float] = model.fit(*data, batch_size=16, epochs=epochs, shuffle=False, verbose=0).history["loss"]
    return found


def main() -> tuple[Any, list[float], list[float], float]:
    """Return the model, the losses of both trainings, and the share of tokens on which int8 agrees."""
    model = transformer()
    whole = train(model, sentences(64, step=1), epochs=8)
    for name in ("up", "down"):
        model.get_layer(name).enable_lora(4)
    data = sentences(64, step=3)
    tuned = train(model, data, epochs=8)
    before = model.predict(data[0], verbose=0)
    model.quantize("int8")
    after = model.predict(data[0], verbose=0)
    agreement = float(np.mean(np.argmax(before, -1) == np.argmax(after, -1)))
    print(f"loss {whole[0]:.4f} -> {whole[-1]:.4f}, by LoRA {tuned[0]:.4f} -> {tuned[-1]:.4f}, int8 {agreement:.0%}")
    return model, whole, tuned, agreement


if __name__ == "__main__":
    main()
