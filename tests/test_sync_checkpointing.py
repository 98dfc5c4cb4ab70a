"""Synchronised layers under activation checkpointing: each batch counts once."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from bnconvert import SyncBatchNorm1d
from bnconvert.testing import run_ranks


def recompute(rank: int) -> None:
    layer: Any = SyncBatchNorm1d(3, momentum=None)
    for number in range(3):
        x = torch.randn(4, 3, requires_grad=True)
        checkpoint(layer, x, use_reentrant=number % 2 == 1).square().sum().backward()
        assert int(layer.num_batches_tracked) == number + 1
        assert layer.track_running_stats
    if dist.is_initialized():  # alone, the compiled forward is that of torch
        compiled = torch.compile(layer, backend="aot_eager")
        checkpoint(compiled, x, use_reentrant=False).square().sum().backward()
        assert int(layer.num_batches_tracked) == 4


@pytest.mark.distributed
def test_activation_checkpointing_updates_statistics_once() -> None:
    run_ranks(recompute, 2)


def test_activation_checkpointing_updates_statistics_once_without_ranks() -> None:
    recompute(0)


class CountsInBackward(torch.autograd.Function):
    """Checkpointing that has plain BatchNorm count once: in the pass that is repeated."""

    @staticmethod
    def forward(ctx: Any, layer: Any, x: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        layer.track_running_stats = False
        with torch.no_grad():
            output: Tensor = layer(x)
        layer.track_running_stats = True
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.layer(x)
        torch.autograd.backward(output, gradients)
        return None, x.grad


def count_in_the_repeated_pass(rank: int) -> None:
    layer, plain = SyncBatchNorm1d(3), nn.BatchNorm1d(3)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    outputs = [
        [CountsInBackward.apply(module, scale * x.clone().requires_grad_()) for scale in (1, 3)]
        for module in (layer, plain)
    ]
    for output in outputs[0] + outputs[1]:
        output.square().sum().backward()
    assert int(layer.num_batches_tracked) == 2  # type: ignore[arg-type]
    torch.testing.assert_close(layer.running_mean, plain.running_mean)
    layer(x).sum().backward()
    layer.eval()(x)
    frozen = SyncBatchNorm1d(3)
    frozen.track_running_stats = False
    checkpoint(frozen, x.requires_grad_(), use_reentrant=False).sum().backward()
    assert int(frozen.num_batches_tracked) == 0  # type: ignore[arg-type]


@pytest.mark.distributed
def test_checkpointing_that_counts_in_the_repeated_pass() -> None:
    run_ranks(count_in_the_repeated_pass, 2)


def test_checkpointing_that_counts_in_the_repeated_pass_without_ranks() -> None:
    count_in_the_repeated_pass(0)


def save_the_sums(rank: int) -> list[Tensor]:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = str(op).startswith("bnconvert.global_sums")
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    torch.manual_seed(rank)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(4, 3, dtype=torch.float64)
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    found: list[Any] = []
    cases: tuple[dict[str, Any], ...] = ({}, {"context_fn": contexts})
    for options in cases:
        layer: Any = SyncBatchNorm1d(3).double()
        x.grad = None
        output = checkpoint(layer, x, use_reentrant=False, **options)
        (weights * output).sum().backward()
        assert x.grad is not None
        found += [x.grad.clone(), layer.weight.grad, layer.running_var]
    return found


@pytest.mark.distributed
def test_sums_may_be_saved_instead_of_sent_again() -> None:
    for found in run_ranks(save_the_sums, 2):
        for expected, got in zip(found[:3], found[3:], strict=True):
            assert torch.equal(expected, got)
