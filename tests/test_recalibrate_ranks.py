"""Recalibration over several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bnconvert as bc
from bnconvert.testing import randomize_batchnorm, run_ranks
from tests.test_recalibrate import (
    Fragile,
    assert_as_before,
    assert_pooled,
    everything,
    failing,
    samples,
    split,
)

UNEVEN = {1: [60], 2: [41, 19], 3: [30, 7, 23]}


@pytest.mark.parametrize("world_size", UNEVEN)
def test_ranks_of_uneven_size_end_with_the_same_pooled_statistics(world_size: int) -> None:
    results = run_ranks(recalibrate_part, world_size, UNEVEN[world_size])
    values = samples(60, 4)
    for mean, var in results:
        assert torch.equal(mean, results[0][0])
        assert torch.equal(var, results[0][1])
        layer = nn.BatchNorm1d(4)
        layer.running_mean, layer.running_var = mean, var
        assert_pooled(layer, values)


def recalibrate_part(rank: int, sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    part = split(samples(60, 4), sizes)[rank]
    model: Any = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    torch.manual_seed(rank)
    nn.init.normal_(model[2].running_mean)
    ddp = DistributedDataParallel(model)
    bc.recalibrate_batchnorm(ddp, split(part, 5))
    return model[0].running_mean, model[0].running_var


def test_synchronised_layers_average_the_batches_of_their_group() -> None:
    for mean, var in run_ranks(recalibrate_sync, 2):
        values = samples(24, 4, mean=1.0).double().view(3, 2, 4, 4)
        batches = [values[step].flatten(0, 1) for step in range(3)]
        torch.testing.assert_close(mean, torch.stack([b.mean(0) for b in batches]).mean(0))
        torch.testing.assert_close(var, torch.stack([b.var(0) for b in batches]).mean(0))


def recalibrate_sync(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    values = samples(24, 4, mean=1.0).double().view(3, 2, 4, 4)
    layer: Any = bc.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(4)).double())
    batches = [values[step, rank] for step in range(3)]
    if rank == 1:
        batches.append(torch.zeros(4, 4).double())  # rank 0 has no fourth batch
    bc.recalibrate_batchnorm(layer, batches, estimator="mean_of_batches")
    return layer[0].running_mean, layer[0].running_var


def test_a_sharded_model_takes_the_estimator_that_goes_batch_by_batch() -> None:
    for mean, text in run_ranks(recalibrate_sharded, 2):
        assert "use estimator='mean_of_batches'" in text
        values = samples(24, 4, mean=1.0)
        torch.testing.assert_close(mean, values.view(6, 4, 4)[[0, 1, 3, 4]].mean((0, 1)))


def recalibrate_sharded(rank: int) -> tuple[torch.Tensor, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: Any = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    batches = list(samples(24, 4, mean=1.0).view(2, 3, 4, 4)[rank])
    with pytest.raises(bc.BnconvertError) as caught:
        bc.recalibrate_batchnorm(model, batches)
    # Rank 0 has one batch less, and every forward needs both ranks.
    loader = batches[: 2 + rank]
    bc.recalibrate_batchnorm(model, loader, estimator="mean_of_batches")
    return model[0].running_mean, str(caught.value)


@pytest.mark.parametrize("estimator", ["population", "mean_of_batches"])
def test_one_failing_rank_fails_all_and_no_rank_is_changed(estimator: str) -> None:
    texts = run_ranks(recalibrate_failing, 3, estimator)
    assert texts[1] == "disk gone"
    assert texts[0] == texts[2] == "rank 1 failed: disk gone"


def test_a_bad_argument_on_one_rank_fails_all() -> None:
    texts = run_ranks(recalibrate_badly, 2, timeout=60.0)
    assert texts[1] == "num_batches: is 0; give at least 1 or None"
    assert texts[0] == f"rank 1 failed: {texts[1]}"


def recalibrate_badly(rank: int) -> str:
    loader = split(samples(12, 4), 4)
    with pytest.raises(bc.BnconvertError) as caught:
        bc.recalibrate_batchnorm(nn.BatchNorm1d(4), loader, num_batches=1 - rank)
    return str(caught.value)


def recalibrate_failing(rank: int, estimator: Any) -> str:
    model = Fragile()
    randomize_batchnorm(model)
    before = everything(model)
    loader = failing(1) if rank == 1 else iter(split(samples(12, 4), 4))
    with pytest.raises((bc.BnconvertError, OSError)) as caught:
        bc.recalibrate_batchnorm(model, loader, estimator=estimator)
    assert_as_before(model, before)
    return str(caught.value)
