"""Runs of both models of a port on one batch: `fill_and_check`, `trace_plan`, `try_plan`, and `make_model_sides`.

A run shows the order in which dense layers take flattened channels (`FlattenTrace`), and for `check=` whether both
models compute the same (`polyamp.porting.check`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from polyamp.errors import PortError
from polyamp.porting.check import (
    GRADIENT_TOLERANCE,
    Batch,
    ChannelOrderAdapter,
    compare_evaluations,
    relative_error,
)
from polyamp.porting.flatten_trace import FlattenTrace
from polyamp.porting.layouts.converter import Evaluation
from polyamp.porting.layouts.input_order import ChannelPosition
from polyamp.porting.layouts.inventory import canonical_gradients
from polyamp.porting.layouts.lazy_array import Array, Lazy
from polyamp.porting.matching.flatten_order import ChannelOrder, OrderQuestion, question_error
from polyamp.porting.model_side import ModelSide, make_model_side
from polyamp.porting.port_report import CheckResult
from polyamp.porting.transfer_plan import TransferPlan, new_leaf_values
from polyamp.trees import map_tree

Cotangents = Callable[[Sequence[Array]], Sequence[Array]]
_SEED: Final = 0


@dataclasses.dataclass(frozen=True)
class DerivedBatch(Batch):
    """Batch whose inputs of the target were made from the source's.

    Args:
        position: position of the channels of the target's images; None if it has the source's inputs as they are,
            without another choice.
    """

    position: ChannelPosition | None = None

    @property
    def as_it_is(self) -> DerivedBatch:
        """The batch with the source's inputs for the target too."""
        return dataclasses.replace(self, target=self.source)

    @property
    def note(self) -> str:
        """Remark for the report; "" if there was no choice."""
        if self.position is None:
            return ""
        if self.target is self.source:
            return "the target took the batch's images as they are, and moves their channels itself"
        return f"the target took the batch's images with their channels {self.position}"


def make_model_sides(source: Any, target: Any, inputs: Any) -> tuple[ModelSide, ModelSide, Batch | None]:
    """Return both sides of a port, and each side's inputs, if there are any."""
    given = None if inputs is None else Batch.of(inputs)
    call = "port(source, target)"
    ours = make_model_side(source, None if given is None else given.source, call, files=True)
    theirs = make_model_side(target, None if given is None else given.target, call)
    if given is None or given.target is not None:
        return ours, theirs, given
    position = theirs.inventory.channels
    if position is None and ours.inventory.channels is not None:  # its layers show it in a call alone
        position = "last" if ours.inventory.channels == "first" else "first"
    images = ChannelOrderAdapter(ours.inventory, theirs.inventory, position).tree(given.source)
    alike = DerivedBatch(given.source, given.source, given.outputs, given.gradients)
    if images is given.source:
        return ours, make_model_side(target, given.source, call), alike
    derived = dataclasses.replace(alike, target=images, position=position)
    try:
        theirs = make_model_side(target, images, call)
    except Exception as error:  # noqa: BLE001  # a user's model may raise anything for the other layout
        try:
            theirs, derived = make_model_side(target, given.source, call), derived.as_it_is
        except Exception:  # noqa: BLE001  # it takes neither; users expect the error for turned images
            raise error from None
    if theirs.inventory.channels == ours.inventory.channels:
        return ours, make_model_side(target, given.source, call), alike
    return ours, theirs, derived


class CheckedModel(NamedTuple):
    """Result of `fill_and_check`.

    Attributes:
        model: the filled target.
        plan: the final plan.
        result: the errors of outputs and gradients.
        notes: remarks for the report.
    """

    model: Any
    plan: TransferPlan
    result: CheckResult
    notes: list[str]


def fill_and_check(
    source: ModelSide, target: ModelSide, plan: TransferPlan, batch: Batch, *, strict: bool
) -> CheckedModel:
    """Fill the target, and verify that it computes what the source computes.

    An error message also lists attributes that differ, because they are its likely cause.

    Raises:
        PortError: the target computes something else, or the order of a layer's rows is not known; its old values are
            then restored.
    """
    if source.converter is None:
        raise PortError(
            "check= runs both models, and the source is no model but its weights. Port without it, or give the model."
        )
    with _TracedRun(source, target, plan, batch, strict=strict, casts=not strict) as run:
        run.trace()
        found, result = run.check()
        return CheckedModel(run.filled, found, result, run.notes)


def trace_plan(
    source: ModelSide, target: ModelSide, plan: TransferPlan, batch: Batch, *, strict: bool
) -> tuple[TransferPlan, list[str]]:
    """Return the plan with the orders of rows that a run of both models shows, and remarks for the report. The target
    keeps its old values.

    Raises:
        PortError: with `strict`, the batch does not show an order.
    """
    if not plan.questions and not plan.traced:
        return plan, []
    with _TracedRun(source, target, plan, batch, strict=strict, casts=True) as run:
        run.trace()
        left = run.open_plan()
        run.restore()
    return left, run.notes


class TrialRun(NamedTuple):
    """Runs of both models, the target with the source's values by a plan.

    Attributes:
        source: the source's evaluation.
        target: the target's.
        error: how outputs or gradients differ; None if they agree.
    """

    source: Evaluation
    target: Evaluation
    error: PortError | None


def try_plan(
    source: ModelSide, target: ModelSide, plan: TransferPlan, batch: Batch, observed: tuple[set[str], set[str]]
) -> TrialRun:
    """Run both models, the target with the source's values, and put the target's old values back.

    Args:
        source: the source.
        target: the target.
        plan: the plan.
        batch: inputs of both.
        observed: paths of layers whose inputs are returned too: of the source, of the target.
    """
    with _TracedRun(source, target, plan, batch, strict=False, casts=True, observed=observed) as run:
        run.trace()
        error = None
        try:
            run.check()
        except PortError as found:
            error = found
        run.restore()
        return TrialRun(*run.evaluations, error)


class _TracedRun:
    """Runs of both models on a batch, the target with the source's values. Restores the target after an error.

    Args:
        source: the source.
        target: the target.
        plan: the plan; its questions are answered as far as the batch shows it.
        batch: inputs of both.
        strict: whether layers whose order is not known are an error.
        casts: whether values are cast where dtypes differ.
        observed: paths of layers whose inputs are returned too, for each side.

    Attributes:
        filled: the target with the source's values.
    """

    def __init__(
        self,
        source: ModelSide,
        target: ModelSide,
        plan: TransferPlan,
        batch: Batch,
        *,
        strict: bool,
        casts: bool,
        observed: tuple[set[str], set[str]] = (set(), set()),
    ) -> None:
        self._source, self._target, self._batch, self._strict, self._casts = source, target, batch, strict, casts
        self._plan = plan
        self._adapter = ChannelOrderAdapter(source.inventory, target.inventory)
        self._trace = FlattenTrace(
            source.inventory,
            target.inventory,
            plan.pairs,
            plan.channel_orders,
            plan.questions,
            plan.traced,
            self._adapter.array,
        )
        self._observed = tuple(one | two for one, two in zip(self._trace.paths, observed, strict=True))
        self._given: list[Array] = []
        self._kept: dict[str, Lazy] = {}
        self.filled: Any = None

    @property
    def notes(self) -> list[str]:
        """Remarks for the report."""
        note = self._batch.note if isinstance(self._batch, DerivedBatch) else ""
        return [note] if note else []

    def __enter__(self) -> _TracedRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.restore()

    def restore(self) -> None:
        """Put the target's old values back."""
        if self._kept and self.filled is not None:
            assert self._target.converter is not None
            self._target.converter.fill(self.filled, self._kept)

    @property
    def evaluations(self) -> tuple[Evaluation, Evaluation]:
        """The last evaluations: of the source, of the target."""
        return self._one, self._two

    def trace(self) -> None:
        """Run both models until the orders of rows no longer change."""
        ours, theirs = self._observed
        self._one = self._evaluate(self._source, self._source.model, self._batch.source, self._our_cotangents, ours)
        self._fill(self._trace.orders)
        for _ in range(len(theirs) + 2):  # each run settles at least the next layer
            if not self._trace.update(self._one, self._two):
                break
            self._fill(self._trace.orders)

    def open_plan(self) -> TransferPlan:
        """Return the plan with the orders that were found, without the layers whose order was not.

        Raises:
            PortError: with `strict`, there are such layers.
        """
        left = self._trace.unsettled()
        plan = self._plan._replace(channel_orders=self._trace.orders, questions=left)
        return plan.without_questions(strict=self._strict, why=self._trace.reasons(self._one, self._two))

    def check(self) -> tuple[TransferPlan, CheckResult]:
        """Return the final plan and the errors of outputs and gradients. Orders that no call shows are right if the
        outputs and gradients are.

        Raises:
            PortError: the models differ, or the order of a layer's rows is not known.
        """
        left = self._trace.unsettled()
        choices = [self._trace.orders]
        if (others := self._trace.without_guesses(left)) != choices[0]:
            choices.append(others)
        first_error: PortError | None = None
        for number, orders in enumerate(choices):
            if number:
                self._fill(orders)
            plan = self._plan._replace(channel_orders=orders, questions=())
            try:
                result = compare_evaluations(self._source, self._target, plan, (self._one, self._two), self._batch)
            except PortError as error:
                first_error = first_error or error
                continue
            unclear = [each for each in left if not self._is_distinguished(each)]
            if unclear:
                plan = plan._replace(questions=unclear).without_questions(
                    strict=self._strict, why=self._trace.reasons(self._one, self._two)
                )
                self.restore()
                self._fill_plan(plan)
            return plan, result
        assert first_error is not None
        if left:
            raise PortError(f"{first_error}\n{question_error(left, self._trace.reasons(self._one, self._two))}")
        raise first_error

    def _is_distinguished(self, question: OrderQuestion) -> bool:
        """Return whether the gradient of a kernel would differ in another order, so that its error proves the order."""
        each = next(each for each in self._plan.pairs if each.target.path == question.path)
        found = canonical_gradients(each.target, each.fit.target, self._two.gradients)
        if question.guess is None or "kernel" not in found:
            return False
        gradient, other = (arrays["kernel"].read() for arrays in (found, question.guess.apply(found)))
        return relative_error(gradient, other) > 10 * GRADIENT_TOLERANCE

    def _fill(self, orders: Mapping[str, ChannelOrder]) -> None:
        """Fill the target with the values in these orders, and run it."""
        self._fill_plan(self._plan._replace(channel_orders=dict(orders), questions=()))
        _, theirs = self._observed
        target = self._target._replace(model=self.filled)
        try:
            self._two = self._evaluate(target, self.filled, self._batch.target, self._their_cotangents, theirs)
        except Exception as error:
            batch = self._batch
            if not isinstance(batch, DerivedBatch) or batch.position is None or batch.target is batch.source:
                raise
            try:
                self._two = self._evaluate(target, self.filled, batch.source, self._their_cotangents, theirs)
            except Exception:  # noqa: BLE001  # it takes neither; users expect the error for turned images
                raise error from None
            self._batch = batch.as_it_is

    def _fill_plan(self, plan: TransferPlan) -> None:
        assert self._target.converter is not None
        leaves, _ = new_leaf_values(plan, self._target.inventory, strict=not self._casts)
        if self._target.converter.in_place and not self._kept:
            self._kept = {
                leaf.name: Lazy.of(_copy_array(leaf.array))
                for layer in self._target.inventory.layers
                for leaf in layer.leaves.values()
                if leaf.name in leaves
            }
        self.filled = self._target.converter.fill(self._target.model, leaves)

    def _evaluate(
        self, side: ModelSide, model: Any, batch: Any, cotangents: Cotangents, inputs: set[str]
    ) -> Evaluation:
        assert side.converter is not None
        more = {"inputs": inputs} if inputs else {}
        return side.converter.evaluate(model, _pack_batch(batch), cotangents, **more)

    def _our_cotangents(self, outputs: Sequence[Array]) -> list[Array]:
        rng = np.random.default_rng(_SEED)
        self._given = [np.asarray(rng.standard_normal(output.shape), np.float32) for output in outputs]
        return self._given

    def _their_cotangents(self, outputs: Sequence[Array]) -> list[Array]:
        adapted = [self._adapter.like(*both) for both in zip(self._given, outputs, strict=False)]
        if [each.shape for each in adapted] == [each.shape for each in outputs]:
            return adapted
        return [np.zeros(output.shape, np.float32) for output in outputs]


def _pack_batch(batch: Any) -> Any:
    """Return a copy of a batch with arrays in C order. torch's convolutions take another stride order as a requested
    layout, and their backward pass can then end the process (2.13 on the CPU). A copy is needed, because an axis of
    length 1 may have any stride."""
    return map_tree(lambda leaf: leaf.copy("C") if isinstance(leaf, np.ndarray) else leaf, batch)


def _copy_array(array: Lazy) -> Array:
    return np.array(array.read())
