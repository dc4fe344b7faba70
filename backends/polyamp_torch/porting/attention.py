"""The form of `nn.MultiheadAttention`: its projections lie packed, or apart where keys and values have sizes of their
own; heads lie side by side in a projection's features. `READERS` is looked up by `walk`.
"""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from polyamp.porting.layouts.forms import Form, Rule
from polyamp.porting.layouts.kinds import default_scale
from polyamp.porting.layouts.operations import Operation, Reshape, Split, Transpose
from polyamp_torch.porting.found import Found, Reader, setting

_APART: Final = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_KERNELS: Final = ("query_kernel", "key_kernel", "value_kernel")
_BIASES: Final = ("query_bias", "key_bias", "value_bias")


def attention(module: Any) -> list[Found]:
    """(features, inputs) -> (inputs, heads, head size); the output's (features, heads * size) -> (heads, size,
    features)."""
    width, heads, size = module.embed_dim, module.num_heads, module.head_dim

    def projected(inputs: int) -> tuple[Operation, ...]:
        return Transpose((1, 0)), Reshape((inputs, width), (inputs, heads, size))

    if module.in_proj_weight is not None:
        rules = [Rule(("in_proj_weight",), _KERNELS, (Split((width,) * 3, 0), *projected(width)))]
    else:
        apart = zip(_APART, _KERNELS, (width, module.kdim, module.vdim), strict=True)
        rules = [Rule((name,), (kernel,), projected(inputs)) for name, kernel, inputs in apart]
    if module.in_proj_bias is not None:
        split = (Split((width,) * 3), Reshape((width,), (heads, size)))
        rules.append(Rule(("in_proj_bias",), _BIASES, split))
    out = (Transpose((1, 0)), Reshape((width, width), (heads, size, width)))
    rules.append(Rule(("out_proj.weight",), ("output_kernel",), out))
    if module.out_proj.bias is not None:
        rules.append(Rule(("out_proj.bias",), ("output_bias",)))
    attributes: dict[str, Any] = {"scale": default_scale(size), "dropout": float(module.dropout), "mask": "drop"}
    kind = "attention with a key of zeros" if module.add_zero_attn else "attention"  # no other framework has the first
    names = {name: name for rule in rules for name in rule.native}
    return [Found((Form(kind, tuple(rules), attributes),), names, lines={"dropout": setting("dropout")})]


READERS: Final[dict[type, Reader]] = {nn.MultiheadAttention: attention}
