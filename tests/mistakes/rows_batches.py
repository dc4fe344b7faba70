"""Mistakes with batches: lists, strings, dataclasses, `None`, ragged tensors, loaders. Rows of `table`."""

from __future__ import annotations

from typing import Final

from tests.mistakes.table import EVERYWHERE, JAX, TENSORFLOW, TORCH, Row, every

_NOTE: Final = r"loss_fn was called with \(model, batch\)"

ROWS: Final = [
    # what is no batch, in every framework
    *every(
        "BatchError",
        EVERYWHERE,
        [
            ("on(iter([batch]))", r"batch must be .*Received: a list_iterator.*for batch in"),
            ("on(b for b in [batch])", r"batch must be .*Received: a generator.*for batch in"),
            ("on(zip(x, x))", r"batch must be .*Received: a zip.*for batch in"),
            ("on({'x': x[:0], 'y': x[:0, :2]})", r"batch is empty.*drop_last=True"),
            ("on(state)", r"batch must be .*Received: a .*State.*step\(state, batch\)"),
            (
                "r = recipe.replace(accumulate_steps=2)\npolyamp.train_step(loss_fn, r)(polyamp.init(model, "
                "r), [batch] * 3)",
                r"list of micro-batches must have accumulate_steps=2 members.*Received: 3",
            ),
        ],
    ),
    # what the loss_fn of this table cannot take: the program's own error, with a note that shows the batch
    *every(
        "KeyError",
        EVERYWHERE,
        [
            ("on({'inputs': x, 'y': x})", rf"{_NOTE}.*\{{'inputs': float32\[4, 3\], 'y': float32\[4, 3\]\}}"),
            ("on({})", rf"{_NOTE}.*\{{\}}.*batch is empty"),
        ],
    ),
    *every(
        "TypeError",
        EVERYWHERE,
        [
            ("on((x, batch['y']))", rf"{_NOTE}.*\(float32\[4, 3\], float32\[4, 2\]\).*batch is a tuple"),
            ("on([x, batch['y']])", rf"{_NOTE}.*\[float32\[4, 3\], float32\[4, 2\]\].*batch is a list"),
            ("on(None)", rf"{_NOTE}.*batch is None"),
            ("on([batch, batch])", rf"{_NOTE}.*a list of 2.*accumulate_steps=2"),
        ],
    ),
    Row("on({'x': x[:, :2], 'y': batch['y']})", "Exception", rf"{_NOTE}.*'x': float32\[4, 2\]"),
    # lists of numbers
    Row(
        "on({'x': x.tolist(), 'y': batch['y']})",
        "Exception",
        r"batch\['x'\] is a list of lists of numbers.*np\.asarray",
        TORCH | JAX,
    ),
    Row(
        "on({'x': [1.0, 2.0, 3.0], 'y': batch['y']})", "Exception", r"batch\['x'\] is a list of 3 numbers.*np\.asarray"
    ),
    Row("on({'x': list(x), 'y': batch['y']})", "Exception", r"batch\['x'\] is a list of 4 arrays.*np\.stack"),
    # text, objects, None
    Row(
        "on({**batch, 'id': ['a', 'b', 'c', 'd']})",
        "BatchError",
        r"batch\['id'\]\[0\] is a str.*JAX.*Take it out of the batch",
        JAX,
    ),
    Row(
        "on({**batch, 'id': np.array(['a', 'b'])})",
        "BatchError",
        r"batch\['id'\] .*text.*Take it out of the batch",
        JAX,
    ),
    Row("on({'x': 'a text', 'y': batch['y']})", "Exception", r"batch\['x'\] is a str"),
    Row("on({'x': None, 'y': batch['y']})", "Exception", r"batch\['x'\] is None"),
    Row(
        "on({**batch, 'f': loss_fn})",
        "BatchError",
        r"batch\['f'\] is a function.*Take it out of the batch",
        JAX | TENSORFLOW,
    ),
    Row(
        "on({'x': np.array([[1.0], [1.0, 2.0]], dtype=object), 'y': batch['y']})",
        "BatchError",
        r"batch\['x'\] is a NumPy array of Python objects.*rows of different length.*Pad",
        JAX | TENSORFLOW,
    ),
    Row(
        "on({'x': np.array([[1.0], [1.0, 2.0]], dtype=object), 'y': batch['y']})",
        "Exception",
        r"batch\['x'\] is a NumPy array of Python objects.*Pad",
        TORCH,
    ),
    # dataclasses
    Row("on(Pair(x, batch['y']))", "TypeError", rf"{_NOTE}.*Pair\(x=float32\[4, 3\], y=float32\[4, 2\]\)", TORCH),
    Row(
        "on(Pair(x, batch['y']))",
        "BatchError",
        r"batch is a Pair.*, a dataclass.*jax\.tree_util\.register_dataclass",
        JAX,
    ),
    Row(
        "on(Pair(x, batch['y']))",
        "BatchError",
        r"batch is a Pair.*, a dataclass\. Use a dict.*dataclasses\.asdict",
        TENSORFLOW,
    ),
    # loaders of the framework's own
    Row(
        "on(torch.utils.data.DataLoader([1, 2]))",
        "BatchError",
        r"batch must be .*Received: a DataLoader.*for batch in",
        TORCH,
    ),
    Row(
        "on(tf.data.Dataset.from_tensors(batch))",
        "BatchError",
        r"batch must be .*Received: .*Dataset.*for batch in",
        TENSORFLOW,
    ),
    # the framework's own ragged tensors
    Row(
        "on({'x': tf.ragged.constant([[1.0], [1.0, 2.0]]), 'y': batch['y']})",
        "LossError",
        r"predictions and targets of one shape",
        TENSORFLOW,
    ),
    Row(
        "r = recipe.replace(accumulate_steps=2)\ns = polyamp.init(model, r)\n"
        "polyamp.train_step(loss_fn, r)(s, {'x': tf.ragged.constant([[1.0], [1.0, 2.0]]), 'y': batch['y'][:2]})",
        "Exception",
        r"batch\['x'\] is a RaggedTensor.*to_tensor\(\)",
        TENSORFLOW,
    ),
    Row(
        "on({'x': torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), 'y': batch['y']})",
        "Exception",
        r"batch\['x'\] is a nested tensor.*to_padded_tensor",
        TORCH,
    ),
    Row(
        "on({'x': torch.ones(4, 3, dtype=torch.int64), 'y': batch['y']})",
        "Exception",
        rf"{_NOTE}.*'x': int64\[4, 3\]",
        TORCH,
    ),
]
