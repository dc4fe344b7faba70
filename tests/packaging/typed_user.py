"""A user's script, checked by test_types.py and never run: each line that ends in `# wrong: WORD` is refused by mypy
and by pyright, with WORD in the message, and no other line is."""

import polyamp


class Net:
    """Some framework's model."""

    hidden = 32

    def __call__(self, x: "Array") -> "Array":
        return x


class Array:
    """Some framework's array."""

    def backward(self) -> None: ...


def loss_fn(model: Net, batch: Array) -> Array:
    loss = polyamp.losses.mean_squared_error(model(batch), batch)
    loss.backwards()  # wrong: backwards
    return loss


recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.adamw(1e-3), clip_norm=1.0)
polyamp.Recipe(clip_nrom=1.0)  # wrong: clip_nrom

state = polyamp.init(Net(), recipe)
step = polyamp.train_step(loss_fn, recipe)
state, result = step(state, Array())
state.modle  # wrong: modle
width: int = state.model.hidden
state.model.hiden  # wrong: hiden
result.los  # wrong: los
print(float(result.loss), int(state.step), recipe.policy)


def report(state: polyamp.State[Net], result: polyamp.StepResult[Array]) -> None:
    """Both say what they hold; `State` and `StepResult` alone hold anything."""
    result.loss.backwards()  # wrong: backwards
    print(state.model.hidden)


def train(state: polyamp.State, result: polyamp.StepResult) -> polyamp.State:
    return step(state, result)[0]


value, gradients = polyamp.value_and_grad(loss_fn)(state, Array())
value, several = polyamp.value_and_grad(loss_fn)([state, state], Array())
gradients.valuse  # wrong: valuse
state, result = polyamp.apply_gradients(state, gradients)
states, results = polyamp.apply_gradients([state, state], several)
states.model  # wrong: model
print(results[0].scale, states[1].model.hidden)
polyamp.save(state, "checkpoint")
state = polyamp.restore(state, "checkpoint")
moved: polyamp.porting.Canonical = polyamp.porting.export(Net())
polyamp.porting.save(moved, "weights.safetensors")
polyamp.porting.lode(Net(), moved)  # wrong: lode
state = polyamp.refresh(state, Net())
polyamp.refresh(state).modle  # wrong: modle
