"""Mistakes with states: what `init`, `train_step`, the two halves, `save` and `restore` are given. Rows of `table`."""

from __future__ import annotations

from typing import Final

from tests.mistakes.table import EVERYWHERE, JAX, TENSORFLOW, TORCH, Row, every

_STATE: Final = r"state must be what polyamp\.init returned"
_STEP: Final = r"state, result = step\(state, batch\)"

ROWS: Final = [
    *every(
        "ArgumentError",
        EVERYWHERE,
        [
            # the step
            ("state = done\nstep(state, batch)", rf"{_STATE}.*Received: a tuple of a state and a StepResult.*{_STEP}"),
            ("step(model, batch)", rf"{_STATE}.*Received: .*state = polyamp\.init\(model, recipe\)"),
            ("step(batch, state)", rf"{_STATE}.*Received: a dict, and the state as batch.*step\(state, batch\)"),
            ("step([state, fresh()], batch)", rf"{_STATE}.*Received: a list of 2 states.*value_and_grad.*one by one"),
            ("step((state, fresh()), batch)", rf"{_STATE}.*Received: a tuple of 2 states"),
            ("result, state = done\nstep(state, batch)", rf"{_STATE}.*Received: a StepResult.*{_STEP}"),
            ("step(None, batch)", rf"{_STATE}.*Received: None"),
            ("step(state, x, batch['y'])", r"takes a state and one batch.*Received: 3 arguments.*\(x, y\)"),
            ("step(recipe, batch)", rf"{_STATE}.*Received: a Recipe"),
            # the halves
            ("half(model, batch)", rf"{_STATE}.*Received: .*polyamp\.init"),
            ("half((state, fresh()), batch)", rf"{_STATE}, or a list of states.*Received: a tuple of 2 states.*list"),
            ("half([state, model], batch)", rf"{_STATE}.*Received at position 1:"),
            ("half([], batch)", r"states must hold at least one state.*Received: an empty list"),
            (
                "polyamp.apply_gradients(grads, state)",
                rf"{_STATE}.*Received: a Gradients.*apply_gradients\(state, grad",
            ),
            ("polyamp.apply_gradients(model, grads)", rf"{_STATE}.*Received:"),
            # files
            ("polyamp.save(model, path)", rf"{_STATE}.*Received: .*polyamp\.init"),
            ("polyamp.save(path, state)", rf"{_STATE}.*Received: .*Path.*save\(state, path\)"),
            ("polyamp.save(done, path)", rf"{_STATE}.*Received: a tuple of a state and a StepResult"),
            ("polyamp.save(state, None)", r"path must be a file's path.*Received: None"),
            ("polyamp.restore(path, state)", rf"{_STATE}.*Received: .*Path.*restore\(state, path\)"),
            ("polyamp.restore(model, path)", rf"{_STATE}.*Received: .*polyamp\.init"),
            ("polyamp.restore(state, state)", r"path must be a file's path.*Received: a .*State"),
        ],
    ),
    *every(
        "RecipeError",
        EVERYWHERE,
        [
            (
                "polyamp.value_and_grad(state)(loss_fn, batch)",
                r"loss_fn must be a function of.*Received: a .*State.*Write",
            ),
            ("polyamp.init(recipe, model)", r"recipe must be a polyamp\.Recipe.*Received: .*init\(model, recipe\)"),
            (
                "polyamp.init(model, 'mixed_float16')",
                r"recipe must be.*Received: 'mixed_float16'.*Recipe\(policy='mixed",
            ),
            ("polyamp.init(model, Policy('bf16'))", r"recipe must be a polyamp\.Recipe.*Received: .*Recipe\(policy="),
            ("polyamp.init(model, polyamp.adamw())", r"recipe must be.*Received: adamw\(\).*Recipe\(.*optimizer="),
            ("polyamp.init(model, Recipe)", r"recipe must be.*Received: the class Recipe.*polyamp\.Recipe\("),
            ("polyamp.init(model, {'policy': 'bf16'})", r"recipe must be.*Received: a dict.*polyamp\.Recipe\("),
            ("polyamp.init(model, 'recipe.toml')", r"recipe must be.*Received: 'recipe\.toml'.*Recipe\.load\("),
            (
                "polyamp.train_step(recipe, loss_fn)",
                r"loss_fn must be.*Received: a Recipe.*train_step\(loss_fn, recipe",
            ),
            ("polyamp.train_step(loss_fn, loss_fn)", r"recipe must be a polyamp\.Recipe.*Received: a function"),
            ("polyamp.train_step(1.0, recipe)", r"loss_fn must be a function of \(model, batch\).*Received: 1\.0.*()"),
            ("half([state, state], batch)", r"states must be different ones.*positions 0 and 1"),
            (
                "polyamp.apply_gradients(state, grads, skip='any')",
                r"skip must be 'all' or 'each'\. Received: skip='any'",
            ),
            (
                "polyamp.train_step(loss_fn, recipe.replace(clip_norm=1.0))(state, batch)",
                r"different recipes.*clip_norm",
            ),
            ("polyamp.train_step(loss_fn, Recipe())(state, batch)", r"different recipes; call init and train_step"),
        ],
    ),
    *every(
        "GradientError",
        EVERYWHERE,
        [
            (
                "polyamp.apply_gradients(state, half(state, batch))",
                r"grads must be the Gradients.*Received: .*a tuple.*"
                r"value, grads = ",
            ),
            ("polyamp.apply_gradients([state], grads)", r"one Gradients per state: 1 states? w.*Received: a Gradients"),
            ("polyamp.apply_gradients(state, [grads])", r"grads must be.*Received: a list"),
            ("polyamp.apply_gradients(state, batch)", r"grads must be the Gradients.*Received: a dict"),
        ],
    ),
    *every(
        "UnsupportedError",
        EVERYWHERE,
        [
            ("polyamp.init(model, recipe, optimizer=polyamp.adamw())", r"init\(\).*accepts.*Received: optimizer="),
            ("polyamp.init(model, recipe, device='cuda')", r"init\(\).*accepts.*Received: device="),
            ("polyamp.train_step(loss_fn, recipe, compiled=True)(state, batch)", r"Received: compiled=.*'compile'"),
            ("polyamp.train_step(loss_fn, recipe, lr=1e-3)(state, batch)", r"train_step\(\).*accepts.*Received: lr="),
        ],
    ),
    Row(
        "polyamp.train_step(loss_fn, recipe, donate=False)(state, batch)",
        "UnsupportedError",
        r"Received: donate=.*updated in place.*nothing to donate.*Drop",
        TORCH | TENSORFLOW,
    ),
    Row(
        "old = fresh()\nstep(old, batch)\nstep(old, batch)",
        "StateError",
        r"the state's arrays are gone.*the state that the step returned.*donate=False",
        JAX,
    ),
    Row("old = fresh()\nstep(old, batch)\nhalf(old, batch)", "StateError", r"arrays are gone.*donate=False", JAX),
    Row(
        "old = fresh()\nstep(old, batch)\npolyamp.save(old, path)",
        "CheckpointError",
        r"this state was donated to a step.*donate=False",
        JAX,
    ),
    *every(
        "BackendError",
        EVERYWHERE,
        [
            (
                "polyamp.init(model, recipe, backend='pytorch2')",
                r"backend must be one of.*Received: 'pytorch2'.*'torch'",
            ),
            ("polyamp.init(model, recipe, backend='tf')", r"backend must be one of.*Received: 'tf'.*mean 'tensorflow'"),
            ("polyamp.init(model, recipe, backend='pytorch')", r"Received: 'pytorch'\. Did you mean 'torch'"),
            ("polyamp.init(42, recipe)", r"no backend recognises builtins\.int.*Pass a model"),
            ("polyamp.init(lambda x: x, recipe)", r"no backend recognises.*function.*Pass.*\(apply_fn, params\)"),
        ],
    ),
    *every(
        "ModelError",
        EVERYWHERE,
        [
            ("polyamp.init(state, recipe)", r"model must be a model.*Received: a .*State.*state\.model"),
            ("polyamp.init(None, recipe)", r"model must be .*Received: None"),
            ("polyamp.init([model], recipe)", r"model must be one model.*Received: a list of 1.*init for each"),
        ],
    ),
    *every(
        "ModelError",
        TORCH | TENSORFLOW,
        [
            (
                "polyamp.init(model, recipe, backend='jax')",
                r"model is of the .* backend.*Received: backend='jax'.*Drop",
            ),
        ],
    ),
    *every(
        "ModelError",
        TORCH,
        [
            ("polyamp.init(nn.Linear, recipe)", r"model must be.*Received: the class.*Linear.*Linear\(\.\.\.\)"),
            ("polyamp.init(model.parameters(), recipe)", r"model must be.*Received: a generator.*model itself"),
            ("polyamp.init(list(model.parameters()), recipe)", r"model must be one model.*Received: a list of 2"),
            ("polyamp.init(model.state_dict(), recipe)", r"Received: an OrderedDict.*load_state_dict"),
            ("polyamp.init(nn.LazyLinear(2), recipe)", r"no shape yet.*Call the model once"),
            ("polyamp.init(nn.Linear(3, 2).half(), recipe)", r"stored as float16.*parameters as float32.*Convert"),
            ("polyamp.init(nn.ReLU(), recipe)", r"no trainable parameters"),
        ],
    ),
    *every(
        "ModelError",
        TENSORFLOW,
        [
            ("polyamp.init(keras.layers.Dense, recipe)", r"model must be.*Received: the class.*Dense"),
            ("polyamp.init(model.trainable_variables, recipe)", r"model must be one model.*Received: a list of 2"),
            (
                "s = polyamp.init(keras.Sequential([keras.layers.Dense(2)]), recipe)\npolyamp.save(s, path)",
                r"the model is not built.*call it once",
            ),
            (
                "s = polyamp.init(keras.Sequential([keras.layers.Dense(2)]), recipe)\npolyamp.restore(s, saved)",
                r"the model is not built.*call it once",
            ),
            (
                "s = polyamp.init(keras.Sequential([keras.layers.Dense(2)]), "
                "recipe)\npolyamp.apply_gradients(s, grads)",
                r"the model is not built.*call it once",
            ),
            ("polyamp.init(keras.layers.ReLU(), recipe)", r"no trainable parameters"),
        ],
    ),
    *every(
        "ModelError",
        JAX,
        [
            (
                "polyamp.init(model[1], recipe)",
                r"Received: a dict.*with the function that uses them, \(apply_fn, params\)",
            ),
            (
                "polyamp.init((model[1], apply_fn), recipe)",
                r"model must be .*\(apply_fn, params\)\. Received: \(builtins\.dict, builtins\.function\)",
            ),
            ("polyamp.init(model, recipe, backend='torch')", r"model is of the jax backend.*Received: backend='torch'"),
            ("polyamp.init(linen.Dense(2), recipe)", r"pass the model as \(linen_module, variables\)"),
            (
                "m = linen.Dense(2)\np = m.init(jax.random.key(0), x)\npolyamp.init((m, p['params']), recipe)",
                r"variables is the whole result of module\.init.*'params' collection",
            ),
            (
                "m = linen.Dense(2)\npolyamp.init((m, jax.random.key(0)), recipe)",
                r"variables is the whole result.*Received",
            ),
            ("polyamp.init(nnx.Linear, recipe)", r"model must be.*Received: the class.*Linear"),
            (
                "polyamp.init(nnx.split(nnx.Linear(3, 2, rngs=nnx.Rngs(0))), recipe)",
                r"nnx\.merge|nnx\.Module.*Received",
            ),
        ],
    ),
]
