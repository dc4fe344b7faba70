"""S12 with `scale`, `unscale` and `update` alone: the loop of `LossScaler.unscale`'s docstring through an overflow."""

from __future__ import annotations

import torch

import polyamp


def test_s12_a_hand_written_loop_leaves_model_and_optimizer_alone_where_gradients_overflow() -> None:
    torch.manual_seed(0)
    scaler, policy = polyamp.LossScaler(init_scale=2.0**8), polyamp.Policy("mixed_float16")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scale_state, forward = scaler.init("torch"), policy.autocast(model)
    x = torch.randn(8, 4)

    def now() -> list[bytes]:
        slots = [value for slot in optimizer.state.values() for value in slot.values()]
        return [tensor.detach().numpy().tobytes() for tensor in (*model.parameters(), *slots)]

    seen, flags = [], []
    for batch in (x, x * torch.inf, x):
        loss = (forward(batch) ** 2).mean()
        optimizer.zero_grad()
        scaler.scale(loss, scale_state).backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
        grads, finite = scaler.unscale([p.grad for p in model.parameters()], scale_state)
        if finite:
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter.grad = grad
            optimizer.step()
        scale_state = scaler.update(scale_state, finite)
        seen.append(now())
        flags.append(bool(finite))
    assert flags == [True, False, True]
    assert seen[0] == seen[1]
    assert seen[1] != seen[2]
    assert float(scale_state.scale) == 2.0**7
