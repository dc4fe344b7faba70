"""Models as text, for the tests of matching: inventories of any framework without the framework.

`sketch` makes one of lines such as "transformer.h.0.ln_1: layer_norm 6": a path with dots or slashes, a kind and its
sizes; "?" behind a kind says that the class is not known, so that several forms come into question.
"""

from __future__ import annotations

import numpy as np

from polyamp.porting.layouts.inventory import Inventory, InventoryLeaf, NativeLayer
from polyamp.porting.layouts.layer_layout import Form, Rule, same
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp.porting.layouts.operations import Flip, Split, Transpose


def layer(line: str, seed: int = 0) -> NativeLayer:
    """One layer of a line."""
    path, _, rest = line.partition(": ")
    kind, *numbers = rest.split()
    bias = "-bias" not in numbers
    attributes = dict(word.split("=") for word in numbers if "=" in word)
    sizes = [int(number) for number in numbers if number.isdigit()]
    path = path.replace(".", "/")
    rng = np.random.default_rng([seed, *path.encode()])
    shapes: dict[str, tuple[int, ...]]
    forms: tuple[Form, ...]
    values: dict[str, object] = {name: float(value) for name, value in attributes.items()}
    unknown, kind = kind.endswith("?"), kind.rstrip("?")
    if kind == "dense":
        shapes = {"kernel": (sizes[0], sizes[1]), **({"bias": (sizes[1],)} if bias else {})}
        forms = (Form("dense", same(*shapes), values),)
        if unknown:
            turned = Rule(("kernel",), ("kernel",), (Transpose((1, 0)),))
            forms += (Form("dense", (turned, *same(*list(shapes)[1:])), values),)
    elif kind in ("conv", "conv_transpose"):
        shapes = {"kernel": (3, 3, sizes[0], sizes[1]), **({"bias": (sizes[1],)} if bias else {})}
        forms = (Form(kind, same(*shapes), {"groups": 1, "channels": "last", **values}),)
        if unknown:
            flipped = Rule(("kernel",), ("kernel",), (Flip((0, 1)),))
            forms += (Form("conv_transpose", (flipped, *same(*list(shapes)[1:])), values),)
    elif kind == "embedding":
        shapes = {"table": (sizes[0], sizes[1])}
        forms = (Form(kind, same("table"), values),)
    elif kind in ("layer_norm", "batch_norm"):
        names = ("scale", "bias") if kind == "layer_norm" else ("scale", "bias", "mean", "variance")
        shapes = dict.fromkeys(names[: None if bias else 1], (sizes[0],))
        forms = (Form(kind, same(*shapes), values),)
    elif kind == "attention_bias":  # as Keras's: of width sizes[0], with sizes[1] heads, each projection by itself
        width, heads = sizes
        roles = ("query", "key", "value")
        shapes = {f"{role}_kernel": (width, heads, width // heads) for role in roles}
        shapes |= {f"{role}_bias": (heads, width // heads) for role in roles}
        shapes |= {"output_kernel": (heads, width // heads, width), "output_bias": (width,)}
        forms = (Form("attention", same(*shapes), values),)
    elif kind == "attention":  # of width sizes[0], with sizes[1] heads; its projection is packed
        width, heads = sizes
        shapes = {"packed": (width, 3 * width), "out": (width, width)}
        names = ("query_kernel", "key_kernel", "value_kernel")
        from polyamp.porting.layouts.operations import Reshape

        split = (Split((width,) * 3), Reshape((width, width), (width, heads, width // heads)))
        out = (Reshape((width, width), (heads, width // heads, width)),)
        forms = (Form(kind, (Rule(("packed",), names, split), Rule(("out",), ("output_kernel",), out)), values),)
    elif kind == "dropout":
        shapes = {}
        forms = (Form(kind, (), values),)
    else:
        shapes = {"value": tuple(sizes)}
        forms = (Form("parameter", same("value")),)
    leaves = {
        name: InventoryLeaf(f"{path}/{name}", Lazy.of(rng.standard_normal(shape).astype(np.float32)))
        for name, shape in shapes.items()
    }
    return NativeLayer(path, leaves, forms)


def sketch(text: str, *, ordered: bool = True, framework: str = "a sketch", seed: int = 0) -> Inventory:
    """An inventory of lines."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return Inventory([layer(line, seed) for line in lines], framework, ordered)
