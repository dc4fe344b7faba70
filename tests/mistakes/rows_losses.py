"""Mistakes in `loss_fn`: what it takes and what it returns. Rows of `table`."""

from __future__ import annotations

from typing import Final

from tests.mistakes.table import EVERYWHERE, JAX, TENSORFLOW, TORCH, Row, every

_LOSS: Final = "l = lambda model, batch: mse(model(batch['x']), batch['y'])\n"
_PAIR: Final = r"loss_fn must return loss or \(loss, aux\)"

ROWS: Final = [
    *every(
        "LossError",
        EVERYWHERE,
        [
            # what it returns
            ("train(lambda model, batch: None)", rf"{_PAIR}\. Received: None\. Is a `return` missing"),
            (
                "train(lambda model, batch: (loss_fn(model, batch), 1, 2))",
                rf"{_PAIR}\. Received: a tuple of 3 items.*"
                r"\(loss, \(a, b\)\)",
            ),
            ("train(lambda model, batch: {'loss': loss_fn(model, batch)})", rf"{_PAIR}\. Received: a dict.*\['loss'\]"),
            ("train(lambda model, batch: {'mse': loss_fn(model, batch)})", rf"{_PAIR}\. Received: a dict.*keys 'mse'"),
            ("train(lambda model, batch: Output(loss_fn(model, batch)))", rf"{_PAIR}\. Received: .*Output.*\.loss"),
            ("train(lambda model, batch: [loss_fn(model, batch), 1.0])", rf"{_PAIR}\. Received: a list of 2.*tuple"),
            (
                "train(lambda model, batch: ({'a': 1}, loss_fn(model, batch)))",
                rf"{_PAIR}\. Received: .*a dict.*loss first",
            ),
            ("train(lambda model, batch: (None, loss_fn(model, batch)))", rf"{_PAIR}\. Received: .*None"),
            (
                "train(lambda model, batch: model(batch['x']))",
                r"must return a scalar loss\. Received shape: \(4, 2\)\..*mean",
            ),
            ("train(lambda model, batch: 'loss')", rf"{_PAIR}\. Received: 'loss'"),
            ("train(lambda model, batch: 1)", r"loss_fn must return .*Received: .*int"),
            ("train(lambda model, batch: 0.5)", r"loss_fn .*float|depends on none"),
            ("train(lambda model, batch: array(1))", r"floating loss\. Received dtype: int|without a gradient"),
            ("train(lambda model, batch: loss_fn(model, batch) > 0)", r"Received.* bool|without a gradient"),
            (
                "train(lambda model, batch: mse(batch['x'], batch['x'] * 2))",
                r"depends on none|depends on the model's param",
            ),
            ("train(lambda model, batch: (lambda: loss_fn(model, batch)))", rf"{_PAIR}\. Received: a function.*call"),
            ("train(lambda model, batch: mse)", rf"{_PAIR}\. Received: a function"),
        ],
    ),
    *every(
        "RecipeError",
        EVERYWHERE,
        [
            # what it takes
            ("train(lambda batch: 0.0)", r"loss_fn must be a function of \(model, batch\).*Received: .*\(batch\)"),
            (
                "train(mse)",
                r"Received: a function \(mean_squared_error\)\. It takes predictions and targets\. Write: def",
            ),
            ("train(lambda: 0.0)", r"loss_fn must be a function of \(model, batch\)"),
            (
                "train(lambda model, x, y: 0.0)",
                r"loss_fn must be a function of \(model, batch\).*Received: .*\(model, x, y\)",
            ),
            ("train(lambda x, y, *, model: 0.0)", r"loss_fn must be a function of \(model, batch\)"),
        ],
    ),
    Row(
        "train(lambda batch, model: loss_fn(model, batch))",
        "TypeError",
        r"loss_fn was called with \(model, batch\).*in this order",
    ),
    *every(
        "LossError",
        TORCH,
        [
            (
                "train(lambda model, batch: loss_fn(model, batch).item())",
                r"Received: 1\.\d+, a float.*without \.item\(\)",
            ),
            ("train(lambda model, batch: loss_fn(model, batch).detach())", r"detached"),
            (
                "def l(model, batch):\n    with torch.no_grad():\n        return loss_fn(model, batch)\ntrain(l)",
                r"under torch\.no_grad\(\)",
            ),
            (
                "def l(model, batch):\n    loss = loss_fn(model, batch)\n    loss.backward()\n    return "
                "loss\ntrain(l)",
                r"loss_fn must not run the backward pass.*Drop loss\.backward\(\)",
            ),
            (
                "def l(model, batch):\n    loss = loss_fn(model, batch)\n    "
                "loss.backward(retain_graph=True)\n    return loss\n"
                "train(l)",
                r"loss_fn must not run the backward pass.*Drop loss\.backward\(\)",
            ),
        ],
    ),
    *every(
        "RecipeError",
        TORCH,
        [
            (
                "train(nn.MSELoss())",
                r"loss_fn must be a function of \(model, batch\).*Received: .*MSELoss.*def loss_fn",
            ),
            ("train(nn.functional.mse_loss)", r"loss_fn must be a function of \(model, batch\).*Received: .*mse_loss"),
            ("train(model)", r"loss_fn must be a function of \(model, batch\).*Received: .*Linear.*def loss_fn"),
        ],
    ),
    *every(
        "RecipeError",
        TENSORFLOW,
        [
            (
                "train(keras.losses.MeanSquaredError())",
                r"loss_fn must be a function of.*Received: .*MeanSquaredError.*def",
            ),
            (
                "train(keras.losses.mean_squared_error)",
                r"loss_fn must be a function of.*Received: .*mean_squared_error",
            ),
            ("train('mse')", r"loss_fn must be a function of \(model, batch\).*Received: 'mse'"),
            ("train(model)", r"loss_fn must be a function of \(model, batch\).*Received: .*Sequential.*def loss_fn"),
        ],
    ),
    *every(
        "RecipeError",
        JAX,
        [
            ("train(optax.l2_loss)", r"loss_fn must be a function of \(model, batch\).*Received: .*l2_loss"),
            ("train(jax.value_and_grad(loss_fn))", r"loss_fn must .*value_and_grad.*polyamp differentiates"),
            ("train(jax.grad(loss_fn))", r"loss_fn must .*grad.*polyamp differentiates"),
            ("train(jax.jit(loss_fn))", r"loss_fn must .*jax\.jit.*polyamp .*compiles.*without it"),
        ],
    ),
    # values of what is traced
    *every(
        "TraceError",
        JAX | TENSORFLOW,
        [
            ("train(lambda model, batch: float(loss_fn(model, batch)))", r"loss_fn .*traced.*float\(\).*Return the"),
            ("train(lambda model, batch: np.asarray(loss_fn(model, batch)))", r"loss_fn .*traced.*NumPy.*jnp|tf\."),
            (
                "def l(model, batch):\n    loss = loss_fn(model, batch)\n    return loss if loss > 0 else "
                "-loss\ntrain(l)",
                r"loss_fn .*traced.*where",
            ),
        ],
    ),
    Row("train(lambda model, batch: loss_fn(model, batch).item())", "TraceError", r"loss_fn .*traced.*\.item\(\)", JAX),
    Row(
        "train(lambda model, batch: loss_fn(model, batch).numpy())",
        "TraceError",
        r"loss_fn .*traced.*numpy\(\)",
        TENSORFLOW,
    ),
    Row("train(lambda model, batch: np.square(model(batch['x'])).mean())", "LossError", r"NumPy.*torch\.", TORCH),
    Row(
        "train(lambda model, batch: np.square(model(batch['x'])).mean())",
        "TraceError",
        r"loss_fn .*NumPy",
        JAX | TENSORFLOW,
    ),
    # aux
    *every(
        "LossError",
        JAX | TENSORFLOW,
        [
            (
                "train(lambda model, batch: (loss_fn(model, batch), {'f': loss_fn}))",
                r"aux.* is a function \(loss_fn\).*must be",
            ),
            ("train(lambda model, batch: (loss_fn(model, batch), {'m': model}))", r"aux.* is a PolicyModule"),
            ("train(lambda model, batch: (loss_fn(model, batch), Pair(1.0, 2.0)))", r"aux is a Pair"),
        ],
    ),
    Row(
        "train(lambda model, batch: (loss_fn(model, batch), {'name': 'a'}))",
        "LossError",
        r"aux\['name'\] is a str.*must be arrays",
        JAX,
    ),
    # the function of the model in place of the model
    Row(
        "train(lambda params, batch: mse(apply_fn(params, batch['x']), batch['y']))",
        "Exception",
        r"called as model\(batch\['x'\]\), not its parameters",
        JAX,
    ),
    Row(
        "m = linen.Dense(2)\ns = polyamp.init((m, m.init(jax.random.key(0), x)), recipe)\n"
        "l = lambda params, batch: mse(m.apply(params, batch['x']), batch['y'])\npolyamp.train_step(l, "
        "recipe)(s, batch)",
        "Exception",
        r"called as model\(batch\['x'\]\), not its parameters",
        JAX,
    ),
    Row(
        "m = linen.Dense(2)\ns = polyamp.init((m, m.init(jax.random.key(0), x)), recipe)\n"
        "l = lambda params, batch: mse(m.apply({'params': params}, batch['x']), batch['y'])\n"
        "polyamp.train_step(l, recipe)(s, batch)",
        "Exception",
        r"called as model\(batch\['x'\]\), not its parameters",
        JAX,
    ),
]
