"""Synchronised layers against `nn.BatchNorm1d` in float64 on the concatenated batch."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bnconvert import SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d
from bnconvert.testing import TOLERANCES, randomize_batchnorm, run_ranks
from tests.sync_support import flat, layout

LAYERS = {2: SyncBatchNorm1d, 3: SyncBatchNorm1d, 4: SyncBatchNorm2d, 5: SyncBatchNorm3d}


@dataclass(frozen=True)
class Case:
    """Shapes per rank, and how the layer and its tensors are made."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float64
    param_dtype: torch.dtype | None = None
    layout: str = "contiguous"
    grad_layout: str = "contiguous"
    mean: float = 0.0
    std: float = 1.0
    steps: int = 2
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def channels(self) -> int:
        return self.shapes[0][1]


def images(*batches: int, c: int = 3, size: tuple[int, ...] = (5, 4)) -> tuple[Any, ...]:
    return tuple((n, c, *size) for n in batches)


def rank_tensors(case: Case, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Return the input and output gradient of a rank, reproducible on every other rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    shape = case.shapes[rank]
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * case.std + case.mean
    # Ranks differ in mean, so that the average of their variances is wrong.
    x = (x + 0.3 * case.std * rank).to(case.dtype)
    if case.grad_layout == "expanded":
        values = torch.randn(shape[:2], generator=generator, dtype=torch.float64)
        grad = values.view(*shape[:2], *[1] * (len(shape) - 2)).to(case.dtype).expand(shape)
    else:
        grad = torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)
        grad = layout(grad, case.grad_layout)
    return layout(x, case.layout), grad


def make_layer(cls: type[nn.Module], case: Case) -> nn.Module:
    layer = cls(case.channels, **case.options).to(case.param_dtype or torch.float64)
    randomize_batchnorm(layer, seed=case.channels)
    return layer


def measure(rank: int, case: Case) -> dict[str, float]:
    """Run the synchronised layer on this rank; return its relative differences from the truth."""
    world = dist.get_world_size()
    layer = make_layer(LAYERS[len(case.shapes[0])], case)
    truth = make_layer(nn.BatchNorm1d, case).double()
    errors: dict[str, float] = {}

    def compare(name: str, got: Tensor | None, want: Tensor | None) -> None:
        assert (got is None) == (want is None), name
        if got is None or want is None or want.numel() == 0:
            return
        assert got.shape == want.shape, (name, got.shape, want.shape)
        scale = max(1.0, float(want.abs().max()))
        errors[name] = max(errors.get(name, 0.0), float((got.double() - want).abs().max()) / scale)

    for step in range(case.steps):
        tensors = [rank_tensors(case, r, step) for r in range(world)]
        inputs = [x.detach().clone().requires_grad_() for x, _ in tensors]
        x = tensors[rank][0].requires_grad_()
        y = layer(x)
        assert y.dtype == case.dtype
        y.backward(tensors[rank][1])
        whole = torch.cat([flat(x) for x in inputs], dim=2)
        expected = truth(whole)
        expected.backward(torch.cat([flat(g) for _, g in tensors], dim=2))
        sizes = [flat(x).shape[2] for x in inputs]
        compare("output", flat(y), expected.split(sizes, dim=2)[rank])
        assert x.grad is not None
        expected_grad = inputs[rank].grad
        assert expected_grad is not None
        compare("grad_input", x.grad, expected_grad.double())
    for name, param in layer.named_parameters():
        assert param.grad is not None
        total = param.grad.double()
        dist.all_reduce(total)
        compare(f"grad_{name}", total, dict(truth.named_parameters())[name].grad)
    for name, buffer in layer.named_buffers():
        compare(name, buffer, dict(truth.named_buffers())[name].double())
        same = [torch.empty_like(buffer) for _ in range(world)]
        dist.all_gather(same, buffer)
        assert all(torch.equal(other, buffer) for other in same), f"{name} differs between ranks"
    return errors


def measure_all(rank: int, cases: list[Case]) -> list[dict[str, float]]:
    return [measure(rank, case) for case in cases]


def assert_exact(world_size: int, cases: list[Case]) -> None:
    for errors in run_ranks(measure_all, world_size, cases):
        for case, found in zip(cases, errors, strict=True):
            limit = TOLERANCES[case.dtype]
            bad = {name: error for name, error in found.items() if not error <= limit.rtol}
            assert not bad, (case, bad)
            assert "output" in found or 0 in [shape[0] for shape in case.shapes]


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_unequal_batches_equal_the_concatenated_batch(world_size: int) -> None:
    uneven = (3, 1, 4, 2)[:world_size]
    one_empty = (3, 0, 2, 1)[:world_size]
    assert_exact(
        world_size,
        [
            Case(images(*uneven)),
            Case(images(*one_empty)),
            Case(tuple((n, 7) for n in uneven)),
            Case(tuple((n, 7, 5) for n in one_empty)),
            Case(images(*uneven, size=(2, 3, 2))),
            Case(tuple((n, 3, 2 + n, 5 - n) for n in uneven)),
            Case(images(*uneven), dtype=torch.float32, param_dtype=torch.float32),
            Case(images(*one_empty), dtype=torch.float32, param_dtype=torch.float32),
        ],
    )


@pytest.mark.distributed
def test_every_channel_count_layout_and_option() -> None:
    single = torch.float32
    layouts = ("contiguous", "channels_last", "strided", "transposed")
    assert_exact(
        2,
        [
            *(Case(images(2, 3, c=c)) for c in (1, 3, 65, 100, 1000)),
            *(
                Case(images(2, 3, c=5), layout=x, grad_layout=dy, dtype=dtype, param_dtype=dtype)
                for x in layouts
                for dy in (*layouts, "expanded")
                for dtype in (torch.float64, single)
            ),
            Case(images(2, 3, size=(2, 3, 2)), layout="channels_last"),
            Case(images(1, 1, size=(1, 1))),  # one value per rank and channel
            Case(((1, 4), (1, 4))),
            Case(images(2, 2), options={"momentum": None}, steps=4),
            Case(images(2, 2), options={"momentum": 0.0}),
            Case(images(2, 2), options={"momentum": 1.0}),
            Case(images(2, 2), options={"affine": False}),
            Case(images(2, 2), options={"track_running_stats": False}),
            Case(images(2, 2), options={"eps": 1e-3}),
        ],
    )


@pytest.mark.distributed
@pytest.mark.skipif(
    not hasattr(nn.BatchNorm2d(1), "bias") or torch.__version__ < "2.14",
    reason="BatchNorm takes bias=False since torch 2.14",
)
def test_layer_without_bias() -> None:
    assert_exact(2, [Case(images(2, 1), options={"bias": False})])


@pytest.mark.distributed
def test_half_inputs_give_statistics_of_full_precision() -> None:
    cases = [
        Case(images(3, 2, c=4, size=(9, 8)), dtype=dtype, param_dtype=param, layout=name, steps=1)
        for dtype in (torch.float16, torch.bfloat16)
        for param in (torch.float32, dtype)
        for name in ("contiguous", "channels_last")
    ]
    assert_exact(2, cases)
    for errors in run_ranks(measure_all, 2, [c for c in cases if c.param_dtype == torch.float32]):
        for found in errors:
            assert found["running_mean"] < 1e-6
            assert found["running_var"] < 1e-6


def track_single_process(rank: int, compiled: bool) -> tuple[float, float]:
    """Ten DDP + SGD steps on two ranks against one process on the whole batch."""
    torch.manual_seed(0)
    plain: Any = nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 4, 3),
        nn.BatchNorm2d(4, momentum=None),
        nn.Flatten(),
        nn.LazyLinear(5),
        nn.BatchNorm1d(5),
    ).double()
    plain(torch.zeros(2, 3, 8, 8, dtype=torch.float64))
    randomize_batchnorm(plain)
    from bnconvert import convert_sync_batchnorm

    model: Any = convert_sync_batchnorm(copy.deepcopy(plain))
    compiled_model = torch.compile(model, fullgraph=True) if compiled else model
    run = nn.parallel.DistributedDataParallel(compiled_model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (plain, model)]
    for _ in range(10):
        batch = torch.randn(6, 3, 8, 8, dtype=torch.float64)
        target = torch.randn(6, 5, dtype=torch.float64)
        for optimizer in optimizers:
            optimizer.zero_grad()
        ((plain(batch) - target) ** 2).mean().backward()
        mine = slice(3 * rank, 3 * rank + 3)
        ((run(batch[mine]) - target[mine]) ** 2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    difference = max(
        float((a - b).abs().max())
        for a, b in zip(plain.state_dict().values(), model.state_dict().values(), strict=True)
    )
    moved = float((plain[1].running_mean).abs().max())
    return difference, moved


@pytest.mark.distributed
def test_ten_ddp_steps_track_the_single_process_run() -> None:
    for difference, moved in run_ranks(track_single_process, 2, False):
        assert difference < 1e-11
        assert moved > 1e-3


@pytest.mark.distributed
def test_training_compiles_in_one_graph_on_two_ranks() -> None:
    for difference, _ in run_ranks(track_single_process, 2, True, timeout=240.0):
        assert difference < 1e-11


def differentiate_twice(rank: int) -> None:
    layer = SyncBatchNorm1d(3)
    x = torch.randn(4, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        torch.autograd.backward(grad.sum())


@pytest.mark.distributed
def test_second_derivative_is_refused_not_wrong() -> None:
    run_ranks(differentiate_twice, 2)


def wrong_channels(rank: int) -> None:
    with pytest.raises(ValueError, match="expected 3 channels in dimension 1"):
        SyncBatchNorm2d(3)(torch.ones(2, 4, 2, 2))
    with pytest.raises(ValueError, match="expected 4D input"):
        SyncBatchNorm2d(3)(torch.ones(2, 3))


@pytest.mark.distributed
def test_wrong_shapes_are_refused_before_any_communication() -> None:
    run_ranks(wrong_channels, 2)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}])
def test_without_distributed_equals_batchnorm_bit_for_bit(
    training: bool, options: dict[str, Any]
) -> None:
    layer, plain = SyncBatchNorm2d(5, **options), nn.BatchNorm2d(5, **options)
    for module in (layer, plain):
        randomize_batchnorm(module)
        module.train(training)
    x = torch.randn(4, 5, 6, 6)
    assert torch.equal(layer(x), plain(x))
    for a, b in zip(layer.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def keeps_group(rank: int) -> None:
    group: Any = dist.new_group([0, 1])
    layer = SyncBatchNorm2d(3, process_group=group)
    assert layer.process_group is group
    assert copy.deepcopy(layer).process_group is group
    assert pickle.loads(pickle.dumps(layer)).process_group is None  # noqa: S301 (made here)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=False).process_group is None


@pytest.mark.distributed
def test_deepcopy_keeps_the_group_and_pickle_does_not() -> None:
    run_ranks(keeps_group, 2)
