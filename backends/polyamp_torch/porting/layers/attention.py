"""Reader of `nn.MultiheadAttention`.

Its projections are packed, or separate where keys and values have different sizes. The heads of a projection are
adjacent along its feature axis.
"""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from polyamp.porting.layouts.layer_kinds import default_attention_scale
from polyamp.porting.layouts.layer_layout import Form, Rule
from polyamp.porting.layouts.operations import Operation, Reshape, Split, Transpose
from polyamp_torch.porting.layers.layer_record import LayerReader, LayerRecord, assignment_line

_SEPARATE_WEIGHTS: Final = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_KERNELS: Final = ("query_kernel", "key_kernel", "value_kernel")
_BIASES: Final = ("query_bias", "key_bias", "value_bias")


def attention(module: Any) -> list[LayerRecord]:
    """Read an attention: (features, inputs) -> (inputs, heads, head size); the output's (features, heads * size) ->
    (heads, size, features)."""
    width, heads, size = module.embed_dim, module.num_heads, module.head_dim

    def projected(inputs: int) -> tuple[Operation, ...]:
        return Transpose((1, 0)), Reshape((inputs, width), (inputs, heads, size))

    if module.in_proj_weight is not None:
        rules = [Rule(("in_proj_weight",), _KERNELS, (Split((width,) * 3, 0), *projected(width)))]
    else:
        apart = zip(_SEPARATE_WEIGHTS, _KERNELS, (width, module.kdim, module.vdim), strict=True)
        rules = [Rule((name,), (kernel,), projected(inputs)) for name, kernel, inputs in apart]
    if module.in_proj_bias is not None:
        split = (Split((width,) * 3), Reshape((width,), (heads, size)))
        rules.append(Rule(("in_proj_bias",), _BIASES, split))
    out = (Transpose((1, 0)), Reshape((width, width), (heads, size, width)))
    rules.append(Rule(("out_proj.weight",), ("output_kernel",), out))
    if module.out_proj.bias is not None:
        rules.append(Rule(("out_proj.bias",), ("output_bias",)))
    attributes: dict[str, Any] = {
        "scale": default_attention_scale(size),
        "dropout": float(module.dropout),
        "mask": "drop",
    }
    kind = "attention with a key of zeros" if module.add_zero_attn else "attention"  # no other framework has it
    names = {name: name for rule in rules for name in rule.native}
    return [LayerRecord((Form(kind, tuple(rules), attributes),), names, lines={"dropout": assignment_line("dropout")})]


READERS: Final[dict[type, LayerReader]] = {nn.MultiheadAttention: attention}
