"""Transposed convolutions of Flax, against the sums that they stand for; eps that files lack."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from bnconvert.checkpoint import convert_checkpoint, load_checkpoint
from bnconvert.errors import CheckpointError
from bnconvert.testing import randomize_batchnorm
from tests.checkpoint_support import pack

if TYPE_CHECKING:
    from pathlib import Path

RANDOM = np.random.default_rng(0)


def flax_file(path: Path, kernel: Any, bias: Any = None) -> Path:
    layer = {"kernel": kernel, **({} if bias is None else {"bias": bias})}
    path.write_bytes(pack({"params": {"ConvTranspose_0": layer}}))
    return path


def correlated(x: Any, kernel: Any, stride: int) -> Any:
    """Return `jax.lax.conv_transpose(x, kernel)` in one axis, padding VALID, summed by hand.

    Zeros are put between the values of x and around them, and the kernel slides over that as it is.

    Args:
        x: [length, in].
        kernel: [taps, in, out].
        stride: Distance of the values.
    """
    taps = len(kernel)
    spread = np.zeros(((len(x) - 1) * stride + 1 + 2 * (taps - 1), x.shape[1]))
    spread[taps - 1 : len(spread) - taps + 1 : stride] = x
    result = np.zeros((len(spread) - taps + 1, kernel.shape[2]))
    for at, tap in itertools.product(range(len(result)), range(taps)):
        result[at] += spread[at + tap] @ kernel[tap]
    return result


@pytest.mark.parametrize("turned", [False, True])
def test_transposed_kernels_of_flax_compute_the_same(tmp_path: Path, turned: bool) -> None:
    x, kernel, bias = (RANDOM.standard_normal(shape) for shape in ((4, 3), (5, 3, 2), (2,)))
    # with transpose_kernel, jax turns the kernel around and swaps its channels before it slides
    stored = np.ascontiguousarray(kernel[::-1].swapaxes(1, 2)) if turned else kernel
    flax_file(tmp_path / "f.msgpack", stored, bias)
    convert_checkpoint(tmp_path / "f.msgpack", tmp_path / "w.safetensors")
    loaded = load_checkpoint(tmp_path / "w.safetensors").tensors
    layer = nn.ConvTranspose1d(3, 2, 5, stride=2).double()
    layer.load_state_dict({n.removeprefix("ConvTranspose_0."): t for n, t in loaded.items()})
    y = layer(torch.tensor(x.T[None]))[0].T.detach().numpy()
    np.testing.assert_allclose(y, correlated(x, kernel, 2) + bias, rtol=1e-12)


@pytest.mark.parametrize(
    ("shape", "bias", "reason"),
    [((3, 3, 4, 4), 4, "a bias of 4 does not say"), ((3, 3, 4, 2), None, "no bias says"),
     ((3, 3, 4, 2), 7, "a bias of 7")],
)  # fmt: skip
def test_transposed_kernels_that_nothing_tells_apart_are_refused(
    tmp_path: Path, shape: tuple[int, ...], bias: int | None, reason: str
) -> None:
    flax_file(tmp_path / "f.msgpack", np.ones(shape), None if bias is None else np.ones(bias))
    with pytest.raises(CheckpointError, match=rf"ConvTranspose_0.*{reason}.*transpose_kernel"):
        load_checkpoint(tmp_path / "f.msgpack")


def test_an_eps_that_the_file_lacks_is_taken_from_the_model_when_told(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, eps=2e-3))
    randomize_batchnorm(model)
    source, target = tmp_path / "a.npz", tmp_path / "b.safetensors"
    np.savez(source, **{name: value.numpy() for name, value in model.state_dict().items()})
    report = convert_checkpoint(source, target, model=model)
    assert load_checkpoint(target).bn == {}
    assert "eps not in the file" in str(report)
    with pytest.raises(CheckpointError, match=r"a\.npz.*which has none.*from-model"):
        convert_checkpoint(source, tmp_path / "c.safetensors", model=model, eps="from-file")
    with pytest.raises(CheckpointError, match="needs a model"):
        convert_checkpoint(source, tmp_path / "c.safetensors", eps="from-model")
    report = convert_checkpoint(source, target, model=model, eps="from-model", overwrite=True)
    eps = load_checkpoint(target).bn["1"]["eps"]
    assert (eps.value, eps.source) == (2e-3, "the target model")
    assert "the file has none" in str(report)
