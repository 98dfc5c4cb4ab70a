"""The operators, and whole layers on the real kernel sources: the shim runs them on CPU tensors."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from bnconvert import convert_sync_batchnorm
from bnconvert.kernels import ops, selection
from bnconvert.testing import TOLERANCES, randomize_batchnorm, run_ranks
from tests.shim.driver import COMPILER, ShimDriver

if TYPE_CHECKING:
    from collections.abc import Callable

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs g++")

CPU = torch.device("cpu")


def arguments(dtype: torch.dtype, channels_last: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(3, 8, 4, 4).to(dtype)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    statistics = torch.cat((torch.randn(8), torch.rand(8) + 0.5, torch.tensor([48.0]))).double()
    return {
        "x": x,
        "grad": torch.empty_like(x).normal_(),
        "residual": torch.empty_like(x).normal_(),
        "weight": torch.randn(8),
        "bias": torch.randn(8),
        "statistics": statistics,
        "mean": torch.randn(8),
        "var": torch.rand(8) + 0.5,
        "count": torch.tensor(3),
    }


@pytest.mark.parametrize("own", [False, pytest.param(True, marks=needs_compiler)])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("dtype", "activation", "affine"),
    [
        (torch.float32, "none", True),
        (torch.bfloat16, "silu", True),
        (torch.float32, "relu", False),
        (torch.float64, "leaky_relu", True),
    ],
)
def test_operators_keep_torchs_rules(
    request: pytest.FixtureRequest,
    one_rank: None,
    own: bool,
    channels_last: bool,
    dtype: torch.dtype,
    activation: str,
    affine: bool,
) -> None:
    if own:
        request.getfixturevalue("shim")
    given = arguments(dtype, channels_last)
    double = dtype == torch.float64
    weight, bias = (
        (given[n].double() if double else given[n]) if affine else None for n in ("weight", "bias")
    )
    x, grad, residual = given["x"], given["grad"], given["residual"]
    space = torch.ops.bnconvert
    check = torch.library.opcheck
    check(space.global_sums.default, (x, ""))
    running = (given["mean"], given["var"], given["count"])
    sums = space.global_sums(x, "")
    rest = (0.1, 1e-5, activation, 0.125)
    check(space.normalize_.default, (x, residual, weight, bias, sums, *running, *rest))
    tensors = (grad, x, residual, weight, bias, given["statistics"])
    for group in ("", None):
        check(space.backward_sums.default, (*tensors, activation, 0.125, group))
    reduced = torch.randn(16, dtype=torch.float64 if double else torch.float32)
    check(space.backward_input.default, (*tensors, reduced, activation, 0.125))


def apply_activation(z: Tensor, name: str) -> Tensor:
    known: dict[str, Callable[[Tensor], Tensor]] = {
        "none": lambda z: z,
        "relu": F.relu,
        "leaky_relu": lambda z: F.leaky_relu(z, 0.125),
        "silu": F.silu,
    }
    return known[name](z)


@pytest.mark.parametrize("own", [False, pytest.param(True, marks=needs_compiler)])
@pytest.mark.parametrize("activation", ["none", "relu", "leaky_relu", "silu"])
def test_residual_and_activation_have_the_gradients_of_autograd(
    request: pytest.FixtureRequest, one_rank: None, own: bool, activation: str
) -> None:
    if own:
        request.getfixturevalue("shim")
    torch.manual_seed(0)
    leaves = [torch.randn(5, 6, 3, 3), torch.randn(5, 6, 3, 3), torch.randn(6), torch.randn(6)]
    grad = torch.randn(5, 6, 3, 3)
    got = [t.clone().requires_grad_() for t in leaves]
    output = ops.synchronized_batch_norm(
        got[0],
        got[2],
        got[3],
        None,
        None,
        None,
        0.1,
        1e-5,
        "",
        residual=got[1],
        activation=activation,
        negative_slope=0.125,
    )
    torch.autograd.backward(output, grad)
    exact = [t.double().requires_grad_() for t in leaves]
    z = F.batch_norm(exact[0], None, None, exact[2], exact[3], True, 0.1, 1e-5) + exact[1]
    expected = apply_activation(z, activation)
    torch.autograd.backward(expected, grad.double())
    close(output, expected)
    for mine, theirs in zip(got, exact, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        close(mine.grad, theirs.grad, scale=4.0)


def close(actual: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    tolerance = TOLERANCES[actual.dtype]
    torch.testing.assert_close(
        actual.double(),
        expected.double(),
        rtol=tolerance.rtol * scale,
        atol=tolerance.atol * scale,
    )


def test_wrong_activations_and_residuals_are_refused() -> None:
    x = torch.randn(2, 3, 4, 4)
    rest = (None, None, None, None, None, 0.1, 1e-5, "")
    with pytest.raises(ValueError, match="'gelu' is not one of none, relu, leaky_relu, silu"):
        ops.synchronized_batch_norm(x, *rest, activation="gelu")
    with pytest.raises(ValueError, match=r"residual has shape \(2, 3, 4, 1\)"):
        ops.synchronized_batch_norm(x, *rest, residual=x[..., :1])


@needs_compiler
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "expanded", "transposed"])
@pytest.mark.parametrize("grad_layout", ["contiguous", "channels_last", "expanded", "transposed"])
def test_every_pair_of_layouts(
    one_rank: None, shim: ShimDriver, layout: str, grad_layout: str
) -> None:
    def laid_out(values: Tensor, name: str) -> Tensor:
        if name == "channels_last":
            return values.contiguous(memory_format=torch.channels_last)
        if name == "expanded":
            return values[..., :1].expand(values.shape)
        return (
            values.transpose(0, 3).contiguous().transpose(0, 3) if name == "transposed" else values
        )

    torch.manual_seed(0)
    x = laid_out(torch.randn(4, 8, 3, 5), layout)
    grad = laid_out(torch.randn(4, 8, 3, 5), grad_layout)
    leaf = x.detach().requires_grad_()
    rest = (None, None, None, None, None, 0.1, 1e-5, "")
    torch.autograd.backward(ops.synchronized_batch_norm(leaf, *rest), grad)
    exact = x.detach().double().requires_grad_()
    expected = F.batch_norm(exact, None, None, None, None, True, 0.1, 1e-5)
    torch.autograd.backward(expected, grad.double())
    assert leaf.grad is not None
    assert exact.grad is not None
    close(leaf.grad, exact.grad)
    assert {v.kernel for v in shim.launched} == {
        "stats",
        "normalize",
        "backward_reduce",
        "backward_input",
    }


ACTIVATIONS = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "silu": nn.SiLU,
    "hard_swish": nn.Hardswish,
}


@needs_compiler
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_timms_activation_is_fused_when_it_is_one_of_ours(
    one_rank: None, shim: ShimDriver, name: str
) -> None:
    stock = BatchNormAct2d(8, act_layer=ACTIVATIONS[name])
    randomize_batchnorm(stock)
    layer = convert_sync_batchnorm(copy.deepcopy(stock))
    x = torch.randn(4, 8, 5, 5)
    grad = torch.randn(4, 8, 5, 5)
    compare_steps(layer, stock.double(), [(x, grad)])
    fused = {v.activation for v in shim.launched if v.kernel != "stats"}
    assert fused == {name if name != "hard_swish" else "none"}


@needs_compiler
@pytest.mark.parametrize("obstacle", ["hook", "pre_hook", "subclass", "dropout", "global_hook"])
def test_activation_that_does_more_is_not_fused(
    one_rank: None, shim: ShimDriver, obstacle: str
) -> None:
    layer = convert_sync_batchnorm(BatchNormAct2d(8))
    seen: list[str] = []
    handle = None
    if obstacle == "hook":
        layer.act.register_forward_hook(lambda *_: seen.append("act"))
    elif obstacle == "pre_hook":
        layer.act.register_forward_pre_hook(lambda *_: seen.append("act"))
    elif obstacle == "dropout":
        layer.drop = nn.Dropout(0.5)
        layer.drop.register_forward_hook(lambda *_: seen.append("act"))
    elif obstacle == "subclass":
        layer.act = NotedReLU(seen)
    else:
        handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append("act"))
    layer(torch.randn(4, 8, 5, 5))
    if handle is not None:
        handle.remove()
    assert seen
    assert all(v.activation == "none" for v in shim.launched)


class NotedReLU(nn.ReLU):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, values: Tensor) -> Tensor:
        self.seen.append("act")
        return super().forward(values)


def compare_steps(layer: nn.Module, exact: nn.Module, steps: list[tuple[Tensor, Tensor]]) -> None:
    """Train both on the same values; the second one in float64."""
    for x, grad in steps:
        leaf, exact_leaf = x.clone().requires_grad_(), x.double().requires_grad_()
        output, expected = layer(leaf), exact(exact_leaf)
        output.backward(grad)
        expected.backward(grad.double())
        close(output, expected)
        assert leaf.grad is not None
        assert exact_leaf.grad is not None
        close(leaf.grad, exact_leaf.grad)
    for (name, mine), theirs in zip(layer.named_parameters(), exact.parameters(), strict=True):
        assert mine.grad is not None, name
        assert theirs.grad is not None, name
        close(mine.grad, theirs.grad, scale=10.0)
    for buffer, expected in zip(layer.buffers(), exact.buffers(), strict=True):
        close(buffer.double().float(), expected)


class Network(nn.Module):
    """Two normalized convolutions, one with a fused activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, bias=False)
        self.act = BatchNormAct2d(8, act_layer=nn.SiLU)
        self.second = nn.Conv2d(8, 5, 3)
        self.norm = nn.BatchNorm2d(5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.second(self.act(self.first(x))))
        return out


def make_network() -> Network:
    torch.manual_seed(1)
    network = Network()
    randomize_batchnorm(network)
    return network


def batch(sizes: tuple[int, ...], step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    rows = sum(sizes)
    return (
        torch.randn(rows, 3, 8, 8, generator=generator),
        torch.randn(rows, 5, 4, 4, generator=generator),
    )


def train_rank(
    rank: int, sizes: tuple[int, ...], compiled: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """Train two steps under DistributedDataParallel; return gradients, state and launches."""
    driver = selection.drivers[CPU] = ShimDriver(multiprocessors=1)
    network = convert_sync_batchnorm(make_network())
    model = torch.compile(network, fullgraph=True, backend="aot_eager") if compiled else network
    parallel = nn.parallel.DistributedDataParallel(model)
    for step in range(2):
        network.zero_grad()
        x, grad = (torch.split(t, list(sizes))[rank] for t in batch(sizes, step))
        # DDP averages the gradients of the ranks: their sum is that of the whole batch.
        parallel(x).backward(grad * len(sizes))
    gradients = {n: p.grad for n, p in network.named_parameters() if p.grad is not None}
    return gradients, dict(network.state_dict()), len(driver.launched)


@needs_compiler
@pytest.mark.distributed
@pytest.mark.parametrize(("sizes", "compiled"), [((3, 0, 2), False), ((3, 2), True)])
def test_ddp_on_the_kernel_sources_is_one_process_on_the_whole_batch(
    sizes: tuple[int, ...], compiled: bool
) -> None:
    ranks = run_ranks(train_rank, len(sizes), sizes, compiled)
    exact = make_network().double()
    for step in range(2):
        exact.zero_grad()
        x, grad = batch(sizes, step)
        exact(x.double()).backward(grad.double())
    for gradients, state, launched in ranks:
        assert launched > 0
        for name, parameter in exact.named_parameters():
            assert parameter.grad is not None
            close(gradients[name], parameter.grad, scale=20.0)
        for name, value in exact.state_dict().items():
            close(state[name].double().float(), value)
