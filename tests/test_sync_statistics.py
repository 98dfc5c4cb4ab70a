"""Statistics of synchronised layers: far from zero, huge, of one value and of none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bnconvert import SyncBatchNorm1d, SyncBatchNorm2d
from bnconvert.kernels import reference
from bnconvert.testing import randomize_batchnorm, run_ranks
from tests.sync_support import flat, layout


@pytest.mark.distributed
@pytest.mark.parametrize("memory", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    ("mean", "std", "limit"), [(1000.0, 0.01, 1e-3), (0.0, 1e-6, 1e-6), (3.0, 1.0, 1e-6)]
)
def test_running_variance_far_from_zero_mean(
    memory: str, mean: float, std: float, limit: float
) -> None:
    for error in run_ranks(running_variance_error, 2, memory, mean, std):
        assert error < limit


def running_variance_error(rank: int, memory: str, mean: float, std: float) -> float:
    torch.manual_seed(rank)
    x = torch.randn(16, 4, 12, 12) * std + mean + 0.3 * std * rank
    layer = SyncBatchNorm2d(4, momentum=1.0)
    layer(layout(x, memory))
    both = [torch.empty_like(x), torch.empty_like(x)]
    dist.all_gather(both, x)
    truth = flat(torch.cat(both)).var(dim=2)[0]
    assert layer.running_var is not None
    return float(((layer.running_var.double() - truth) / truth).abs().max())


@pytest.mark.parametrize("memory", ["contiguous", "channels_last"])
def test_values_whose_squares_overflow(memory: str) -> None:
    torch.manual_seed(0)
    x = layout(torch.randn(4, 3, 8, 8) * 1e17 + 1e20, memory)
    mean, var, _ = reference.parts(reference.finalize(reference.local_sums(x)))
    exact = flat(x)
    torch.testing.assert_close(mean, exact.mean(dim=2)[0])
    torch.testing.assert_close(var, exact.var(dim=2, correction=0)[0], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("memory", ["contiguous", "channels_last"])
@pytest.mark.parametrize(("mean", "limit"), [(0.0, 2e-6), (60.0, 1e-5), (1e4, 5e-6)])
def test_results_keep_their_digits_far_from_zero_mean(
    memory: str, mean: float, limit: float
) -> None:
    torch.manual_seed(0)
    x = layout(torch.randn(8, 65, 14, 14) + mean, memory)
    weight, bias = torch.randn(65), torch.randn(65)
    batch_mean, var, _ = reference.parts(reference.finalize(reference.local_sums(x)))
    y = reference.normalize(x, weight, bias, batch_mean, (var + 1e-5).rsqrt())
    exact = F.batch_norm(x.double(), None, None, weight.double(), bias.double(), training=True)
    torch.testing.assert_close(y.double(), exact, rtol=0.0, atol=limit)


def empty_everywhere(rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    layer = SyncBatchNorm2d(3)
    randomize_batchnorm(layer)
    before = copy.deepcopy(layer.state_dict())
    x = torch.empty(0, 3, 4, 4, dtype=dtype, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.shape
    assert x.grad is not None
    for name, value in before.items():
        assert torch.equal(layer.state_dict()[name], value), name
    return {"weight": layer.weight.grad, "bias": layer.bias.grad}


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_no_value_on_any_rank_leaves_statistics_untouched(dtype: torch.dtype) -> None:
    for grads in run_ranks(empty_everywhere, 2, dtype):
        assert not grads["weight"].any()
        assert not grads["bias"].any()


def one_value_in_the_world(rank: int) -> None:
    layer: Any = SyncBatchNorm1d(3, momentum=0.25)
    randomize_batchnorm(layer)
    before = copy.deepcopy(layer)
    x = torch.arange(3.0).view(1, 3) if rank == 0 else torch.empty(0, 3)
    layer(x)
    assert torch.equal(layer.running_var, before.running_var)
    assert int(layer.num_batches_tracked) == 1
    expected = 0.75 * before.running_mean + 0.25 * torch.arange(3.0)
    torch.testing.assert_close(layer.running_mean, expected)


@pytest.mark.distributed
def test_one_value_in_the_world_leaves_running_var_untouched() -> None:
    run_ranks(one_value_in_the_world, 2)


def too_few_values_alone(rank: int) -> str:
    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        SyncBatchNorm1d(3)(torch.ones(1, 3))
    return str(caught.value)


@pytest.mark.distributed
def test_one_rank_alone_needs_more_than_one_value_as_batchnorm_does() -> None:
    run_ranks(too_few_values_alone, 1)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        SyncBatchNorm2d(3)(torch.ones(1, 3, 1, 1))
