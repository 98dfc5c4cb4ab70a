"""Estimates the running statistics of BatchNorm layers anew, from data.

A layer's running statistics are right when they are those of its input, computed by the network as
it is in eval mode. Two estimators:

- `population`: layer by layer in the order of execution, the mean and the unbiased variance of all
  values that reach the layer while the layers before it already use their new statistics. All
  batches go through the network in step (`lockstep`), so that this takes one pass over the data,
  and the memory of one activation per batch. A forward that keeps something of a batch on a module
  is found by calling some batches alone (`alone`), and refused.
- `mean_of_batches`: every layer normalizes with the statistics of its batch, as in training, and
  the averages of the batches' means and unbiased variances are kept (PreciseBN: Wu and Johnson,
  "Rethinking 'Batch' in BatchNorm", 2021). One batch in memory at a time.

Everything but the BatchNorm layers runs in eval mode: dropout is off and other layers keep their
state. A layer that is called several times per batch counts every call.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn

from bnconvert.collective import Ranks
from bnconvert.errors import BnconvertError, first_line
from bnconvert.forwarding import default_forward, is_sharded, unwrap, without_compilation
from bnconvert.layers.group import check_group
from bnconvert.probe import buffers_kept, in_eval_mode
from bnconvert.recalibration.mean_of_batches import mean_of_batches
from bnconvert.recalibration.population import population
from bnconvert.recalibration.run import Forward, Progress, Run
from bnconvert.recalibration.running_statistics import (
    RecalibrationReport,
    Statistics,
    find_layers,
    make_report,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed import ProcessGroup

Estimator = Literal["population", "mean_of_batches"]


def recalibrate_batchnorm(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    num_batches: int | None = None,
    forward: Forward | None = None,
    device: torch.device | str | None = None,
    process_group: ProcessGroup | None = None,
    estimator: Estimator = "population",
    progress: Progress | None = None,
) -> RecalibrationReport:
    """Replace the running statistics of the model's BatchNorm layers by those of the data.

    Means and variances are accumulated in float64 over all batches and all ranks, weighted by
    their number of values, and written in place; every rank ends with the same statistics, for
    plain BatchNorm layers too. Frozen layers, layers without running statistics and
    `num_batches_tracked` are left as they are; so where momentum is None and nothing was counted,
    the next training batch takes the place of the new statistics. When anything fails, the model
    is as before on every rank.

    Args:
        model: The model; DistributedDataParallel and compiled models are seen through.
        loader: This rank's batches: tensors, or tuples and lists whose first item is the input.
            Ranks may have different numbers of batches.
        num_batches: Number of batches to use of this rank's loader; None uses all of them. The
            `population` estimator holds an activation of each batch at the same time.
        forward: Called with the model and a batch, when calling `model(input)` is not enough.
        device: Where batches are moved; None takes the device of the model's first parameter.
        process_group: The ranks that share their statistics; None is the default group when
            torch.distributed is initialized.
        estimator: "population" or "mean_of_batches"; see the module's description. With
            "mean_of_batches", synchronised layers normalize with the batch of their group. Then,
            and with FSDP, the steps end when the first rank has no more batches.
        progress: Called with the number of finished steps and of all steps.

    Returns:
        What happened to each layer, with the shift of its statistics.

    Raises:
        BnconvertError: The loader is empty or shorter than `num_batches`, a layer got one value
            or values that are not finite, another rank failed, or `estimator` is "population" and
            the model is sharded by FSDP, or keeps something of a batch outside its local variables.
    """
    check_group(process_group)
    ranks = Ranks(process_group)
    try:
        _check_callables(forward=forward, progress=progress)
        network = unwrap(model)
        found = find_layers(network)
        _check(network, num_batches, estimator)
        _refuse_inference(found.statistics)
        where = _device(device, network)
    except Exception as error:  # the other ranks wait for this one
        ranks.fail(error)
        raise
    run = Run(
        network,
        found.statistics,
        ranks,
        forward or default_forward,
        where,
        progress or (lambda done, total: None),
    )
    written = [tensor for s in found.statistics.values() for tensor in (s.mean, s.variance)]
    # The compiler's setting holds for all threads at once.
    with in_eval_mode(network), buffers_kept(network, written), without_compilation(network):
        try:
            estimate = population if estimator == "population" else mean_of_batches
            estimate(run, _batches(loader, num_batches))
            ranks.share(None)  # until every rank has succeeded; behind this nothing can fail
        except BaseException as error:
            for statistics in found.statistics.values():
                statistics.restore()
            if isinstance(error, Exception):
                ranks.fail(error)
            raise
    return make_report(found)


def _check(network: nn.Module, num_batches: int | None, estimator: str) -> None:
    if estimator not in get_args(Estimator):
        raise BnconvertError(
            f"estimator: is {estimator!r}; use one of {', '.join(get_args(Estimator))}"
        )
    if num_batches is not None and (not isinstance(num_batches, int) or num_batches < 1):
        raise BnconvertError(f"num_batches: is {num_batches!r}; give at least 1 or None")
    if estimator == "population" and is_sharded(network):
        raise BnconvertError(
            "model: its parameters are sharded (FSDP), so its batches cannot wait for each other "
            "at a layer; use estimator='mean_of_batches'"
        )
    for name, tensor in itertools.chain(network.named_parameters(), network.named_buffers()):
        if tensor.is_meta:
            raise BnconvertError(f"{name}: is on the meta device; load weights first")


def _check_callables(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None and not callable(value):
            raise BnconvertError(f"{name}: expected a function or None, got {value!r}")


def _refuse_inference(layers: dict[nn.Module, Statistics]) -> None:
    for layer, statistics in layers.items():
        if any(buffer.is_inference() for buffer in layer.buffers(recurse=False)):
            raise BnconvertError(
                f"{statistics.name}: its statistics were made in torch.inference_mode, where they "
                "cannot be changed later; build the model outside it"
            )


def _device(device: torch.device | str | None, model: nn.Module) -> torch.device:
    if device is not None:
        try:
            where = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise BnconvertError(
                f"device: torch knows no {device!r}; give 'cpu' or 'cuda'"
            ) from error
        try:
            torch.empty(0, device=where)
        except (RuntimeError, AssertionError) as error:  # no driver, no such index, not built in
            raise BnconvertError(f"device: {where} cannot be used: {first_line(error)}") from error
        return where
    tensors = itertools.chain(model.parameters(), model.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _batches(loader: Iterable[Any], num_batches: int | None) -> Iterable[Any]:
    """Yield the batches that are asked for; none or too few are an error."""
    if isinstance(loader, torch.Tensor):
        raise BnconvertError(
            "loader: is one tensor; give batches to iterate over, such as tensor.split(32)"
        )
    try:
        iterator = iter(loader)
    except TypeError as error:
        raise BnconvertError(f"loader: expected batches to iterate over, got {loader!r}") from error
    count = 0
    for batch in itertools.islice(iterator, num_batches):
        count += 1
        yield batch
    if not count:
        raise BnconvertError("loader: has no batch; give at least one")
    if num_batches is not None and count < num_batches:
        raise BnconvertError(
            f"loader: has {count} batches but num_batches is {num_batches}; "
            "give more data or a smaller number"
        )
