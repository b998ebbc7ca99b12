"""Gradient plans: how the rows of a micro-batch pass through the model, for one and the same gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")
GradientPlan = Literal["single", "accumulate", "replay"]


def check_plan(plan: str, rows_per_forward: int | None, additive: bool, method: str) -> None:
    """Raise ValueError where there is no such plan or it does not fit the method; `additive` as `additive_rows`."""
    if plan not in ("single", "accumulate", "replay"):
        raise ValueError(f"method.gradient_plan={plan!r}; use single, accumulate or replay")
    if plan == "accumulate" and not additive:
        raise ValueError(
            f"method.gradient_plan=accumulate needs a loss that is a sum over rows, {method}'s is not;"
            " use replay, which is exact for every method"
        )
    if rows_per_forward is not None and rows_per_forward < 1:
        raise ValueError(f"method.rows_per_forward={rows_per_forward} must be at least 1, or null for all rows")


def chunks(count: int, size: int | None) -> list[slice]:
    """`count` rows in consecutive slices of at most `size` (None: one slice)."""
    step = count if size is None else size
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def recomputed(score: Callable[..., T]) -> Callable[..., T]:
    """`score` that keeps no activations: the backward pass computes them again, one call at a time."""

    def call(*arguments: Any) -> T:
        result: T = checkpoint(score, *arguments, use_reentrant=False, preserve_rng_state=True)
        return result

    return call


class _Accumulated(torch.autograd.Function):
    """Differentiates part after part in the forward pass and hands the summed gradient over in the backward pass.

    So the graph of one part at a time is alive, while Lightning sees one loss and calls one backward.
    """

    @staticmethod
    def forward(
        ctx: Any, loss_of: Callable[[slice], Tensor], parts: Sequence[slice], *parameters: nn.Parameter
    ) -> Tensor:
        total, gradients = None, [torch.zeros_like(parameter) for parameter in parameters]
        for part in parts:
            with torch.enable_grad():
                loss = loss_of(part)
                found = torch.autograd.grad(loss, parameters, allow_unused=True)
            for gradient, new in zip(gradients, found, strict=True):
                if new is not None:
                    gradient += new
            total = loss.detach() if total is None else total + loss.detach()
        ctx.gradients = gradients
        assert total is not None  # `parts` is never empty
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        return None, None, *(gradient * grad_outputs[0] for gradient in ctx.gradients)


def accumulated(
    loss_of: Callable[[slice], Tensor], parts: Sequence[slice], parameters: Sequence[nn.Parameter]
) -> Tensor:
    """Sum of `loss_of(part)` over the parts, differentiated with one part's activations alive at a time.

    Exact only where the whole loss is that sum. Costs one more copy of the gradient.
    """
    result: Tensor = _Accumulated.apply(loss_of, parts, *parameters)
    return result


def check_accumulation(trainer: L.Trainer) -> None:
    """Whether `accumulated` gives the right gradient in this trainer.

    Raises:
        ValueError: the weights are sharded, or the loss is scaled after the gradient is taken.
    """
    sharded, plugin = isinstance(trainer.strategy, (FSDPStrategy, ModelParallelStrategy)), trainer.precision_plugin
    if sharded:
        raise ValueError(
            "method.gradient_plan=accumulate differentiates outside of the sharding's hooks; use replay under"
            f" {type(trainer.strategy).__name__}"
        )
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None and plugin.scaler.is_enabled():
        raise ValueError(
            "method.gradient_plan=accumulate differentiates before the loss is scaled, so that small gradients vanish"
            f" in float16 (trainer.precision={plugin.precision}); use trainer.precision=bf16-mixed, or"
            " method.gradient_plan=replay"
        )
