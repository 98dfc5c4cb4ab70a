"""A collective check that all ranks hold the same synchronised layers.

A layer that is in eval mode, frozen or absent on one rank makes the others wait for ever in
training. Run once before the first step, this check turns the hang into a sentence.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bnconvert.errors import BnconvertError
from bnconvert.kernels import comm
from bnconvert.layers import Kind
from bnconvert.layers.group import check_group, group_of, ranges
from bnconvert.walk import find_norms

if TYPE_CHECKING:
    from torch import nn

    from bnconvert.walk import Norm


@dataclass(frozen=True)
class _Layer:
    """What has to be equal on all ranks; `members` on those of one group."""

    name: str
    type: str
    num_features: int
    dtype: str
    training: bool
    track_running_stats: bool
    affine: bool
    eps: float
    momentum: float | None
    members: tuple[int, ...]


@dataclass(frozen=True)
class _Facts:
    """What one rank says of its model.

    Attributes:
        layers: The synchronised layers, in the order of the model.
        trained: Names of the parameters that require a gradient, where there are such layers: a
            layer communicates in the backward pass only where something before it is trained.
    """

    layers: tuple[_Layer, ...]
    trained: tuple[str, ...]


def verify_ranks(model: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
    """Check that every rank holds the same synchronised layers, flags, widths and groups.

    Parameters that require a gradient on one rank only are found too: the backward pass of a
    synchronised layer runs, and waits for the others, where something before it is trained.

    So is a model that DistributedDataParallel wrapped when fewer of its parameters required one.

    Every rank of the group has to call this. Without torch.distributed there is nothing to check.

    Args:
        model: The model, wrapped or not.
        process_group: The ranks to compare; None is the default group.

    Raises:
        BnconvertError: On every rank, naming the first layer or parameter that differs and the
            ranks.
    """
    if not dist.is_available() or not dist.is_initialized():
        return
    check_group(process_group)
    mine: _Facts | str
    try:
        mine = _facts(model)
    except BnconvertError as error:  # the other ranks wait for this one
        mine = str(error)
    gathered: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(gathered, mine, group=process_group)
    ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    problem = _first_difference(dict(zip(ranks, gathered, strict=True)))
    if problem:
        raise BnconvertError(f"verify_ranks: {problem}")


_SYNC = (Kind.SYNC, Kind.FOREIGN_SYNC)


def _facts(model: nn.Module) -> _Facts:
    layers = tuple(_describe(norm) for norm in find_norms(model) if norm.kind in _SYNC)
    _refuse_unreduced(model)
    trained = tuple(name for name, p in model.named_parameters() if p.requires_grad)
    return _Facts(layers, trained if layers else ())


def _refuse_unreduced(model: nn.Module) -> None:
    """Raise if DistributedDataParallel was made before parameters were unfrozen."""
    for wrapper in model.modules():
        if not isinstance(wrapper, DistributedDataParallel) or not hasattr(wrapper, "reducer"):
            continue
        buckets = wrapper.reducer._get_zeros_like_grad_buckets()
        reduced = {id(parameter) for bucket in buckets for parameter in bucket.parameters()}
        trained = [
            (name, parameter)
            for name, parameter in wrapper.module.named_parameters()
            if parameter.requires_grad and name not in wrapper.parameters_to_ignore
        ]
        missing = [name for name, parameter in trained if id(parameter) not in reduced]
        if missing:
            others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise BnconvertError(
                f"{missing[0]}{others}: DistributedDataParallel averages no gradient here, as it "
                "was made while this was frozen or not yet in the model; wrap the model again"
            )


def _describe(norm: Norm) -> _Layer:
    layer: Any = norm.module
    tensor = next((t for t in (layer.running_mean, layer.weight) if t is not None), None)
    return _Layer(
        norm.name,
        type(layer).__name__,
        layer.num_features,
        "none" if tensor is None else str(tensor.dtype).removeprefix("torch."),
        layer.training,
        layer.track_running_stats,
        layer.affine,
        layer.eps,
        layer.momentum,
        tuple(_members(norm)),
    )


def _members(norm: Norm) -> list[int]:
    try:
        return comm.ranks_of(group_of(norm.module))
    except BnconvertError as error:
        raise BnconvertError(f"{norm.name or 'the model'}: {error}") from error


def _first_difference(by_rank: dict[int, _Facts | str]) -> str:
    for rank, facts in by_rank.items():
        if isinstance(facts, str):
            return f"rank {rank}: {facts}"
    known: dict[int, _Facts] = {r: f for r, f in by_rank.items() if isinstance(f, _Facts)}
    return _layer_difference({r: facts.layers for r, facts in known.items()}) or (
        _trained_difference({r: facts.trained for r, facts in known.items()})
    )


def _trained_difference(trained: dict[int, tuple[str, ...]]) -> str:
    sets = {rank: set(names) for rank, names in trained.items()}
    for name in dict.fromkeys(name for names in trained.values() for name in names):
        on = [rank for rank, names in sets.items() if name in names]
        if len(on) < len(sets):
            off = [rank for rank in sets if rank not in on]
            return (
                f"{name}: requires a gradient on {_ranks(on)} but not on {_ranks(off)}, so that "
                "backward passes would wait for each other; make it the same on every rank"
            )
    return ""


def _layer_difference(described: dict[int, tuple[_Layer, ...]]) -> str:
    first_rank, *others = described
    for index, layer in enumerate(described[first_rank]):
        found = {r: described[r][index] if index < len(described[r]) else None for r in others}
        holding = [r for r in others if _holds(described[r], layer.name)]
        problem = _difference(layer, first_rank, found, holding)
        if problem:
            return problem
    return _extra_layer(described, first_rank)


def _holds(layers: tuple[_Layer, ...], name: str) -> bool:
    return any(layer.name == name for layer in layers)


def _difference(
    layer: _Layer, first_rank: int, found: dict[int, _Layer | None], holding: list[int]
) -> str:
    """Compare one layer of the first rank with the layers at the same place of the others.

    `holding` are the ranks that have a layer of this name, there or elsewhere.
    """
    elsewhere = [r for r, o in found.items() if o is None or o.name != layer.name]
    absent = [rank for rank in elsewhere if rank not in holding]
    if absent:
        return (
            f"{layer.name or 'the model'}: is synchronised on rank {first_rank} but not on "
            f"{_ranks(absent)}; convert, freeze and exclude the same layers on every rank"
        )
    if elsewhere:
        return (
            f"{layer.name or 'the model'}: comes at another place among the layers of "
            f"{_ranks(elsewhere)} than of rank {first_rank}; build the model in the same order on "
            "every rank"
        )
    for key, value in asdict(layer).items():
        if key != "members":
            differing = {r: getattr(o, key) for r, o in found.items() if getattr(o, key) != value}
            if differing:
                other_value = next(iter(differing.values()))
                return (
                    f"{layer.name or 'the model'}: {key} is {value!r} on rank {first_rank} but "
                    f"{other_value!r} on {_ranks(list(differing))}; make it the same on every rank"
                )
    return _group_difference({first_rank: layer, **{r: o for r, o in found.items() if o}})


def _group_difference(layers: dict[int, _Layer]) -> str:
    for rank, layer in layers.items():
        for member in layer.members:
            other = layers.get(member)
            if other is not None and other.members != layer.members:
                return (
                    f"{layer.name or 'the model'}: rank {rank} synchronises with ranks "
                    f"{ranges(layer.members)} but rank {member} with ranks "
                    f"{ranges(other.members)}; give all members the same group"
                )
    return ""


def _extra_layer(described: dict[int, tuple[_Layer, ...]], first_rank: int) -> str:
    count = len(described[first_rank])
    longer = {rank: layers for rank, layers in described.items() if len(layers) > count}
    if not longer:
        return ""
    extra = next(iter(longer.values()))[count]
    return (
        f"{extra.name or 'the model'}: is synchronised on {_ranks(list(longer))} but not on "
        f"rank {first_rank}; convert, freeze and exclude the same layers on every rank"
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranges(ranks)}"
