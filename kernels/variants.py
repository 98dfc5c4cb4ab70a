"""The instantiations of the kernels, and the translation units they are compiled from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

FOLDER = Path(__file__).parent / "cuda"

HARDWARE = "hardware.cuh"
SOURCES = (
    "vector.cuh",
    "position.cuh",
    "reduction.cuh",
    "activation.cuh",
    "channel.cuh",
    "stats.cuh",
    "normalize.cuh",
    "backward_reduce.cuh",
    "backward_input.cuh",
)
"""The files in the order in which a translation unit includes them, after `HARDWARE`."""

KERNELS = ("stats", "normalize", "backward_reduce", "backward_input")

SCALARS = {torch.float32: "float", torch.float16: "Half", torch.bfloat16: "BFloat16"}
"""The dtypes of input and output, with their names in the sources."""

ACTIVATIONS = {"none": "kNone", "relu": "kRelu", "leaky_relu": "kLeakyRelu", "silu": "kSilu"}
"""The activations that the kernels apply, with their names in the sources."""

VECTOR_BYTES = 16


@dataclass(frozen=True)
class Variant:
    """One instantiation of a kernel.

    Attributes:
        kernel: One of `KERNELS`.
        dtype: dtype of input and output, a key of `SCALARS`.
        channels_last: Whether neighbours in memory belong to neighbouring channels.
        width: Elements per memory access: 1, 2, 4 or 8, at most 16 bytes.
        activation: A key of `ACTIVATIONS`.
        residual: Whether a tensor is added before the activation.
    """

    kernel: str
    dtype: torch.dtype
    channels_last: bool
    width: int
    activation: str = "none"
    residual: bool = False

    @property
    def name(self) -> str:
        """The name of the compiled function."""
        parts = [self.kernel, SCALARS[self.dtype].lower(), f"v{self.width}"]
        parts.append("channels_last" if self.channels_last else "channels_first")
        if self.activation != "none":
            parts.append(self.activation)
        if self.residual:
            parts.append("residual")
        return "_".join(parts)

    @property
    def arguments(self) -> str:
        """The name of the structure that the function takes."""
        return "".join(word.capitalize() for word in self.kernel.split("_")) + "Arguments"

    def definition(self) -> str:
        """Return the C++ text of the function."""
        layout = "kChannelsLast" if self.channels_last else "kChannelsFirst"
        template = [SCALARS[self.dtype], layout, str(self.width)]
        if self.kernel != "stats":
            template += [ACTIVATIONS[self.activation], str(self.residual).lower()]
        return (
            f'extern "C" __global__ void __launch_bounds__(kMaxThreads, 2)\n'
            f"{self.name}(const __grid_constant__ {self.arguments} arguments) {{\n"
            f"  {self.kernel}<{', '.join(template)}>(arguments);\n}}\n"
        )


def all_variants() -> list[Variant]:
    """Return every instantiation that a launch can ask for."""
    variants = []
    for dtype, channels_last in product(SCALARS, (True, False)):
        for width in widths(dtype):
            variants.append(Variant("stats", dtype, channels_last, width))
            for kernel, activation, residual in product(KERNELS[1:], ACTIVATIONS, (False, True)):
                # Without an activation the backward pass does not depend on the residual.
                if kernel == "normalize" or activation != "none" or not residual:
                    variants.append(
                        Variant(kernel, dtype, channels_last, width, activation, residual)
                    )
    return variants


def widths(dtype: torch.dtype) -> list[int]:
    """Return the numbers of elements that one access can move, largest first."""
    return [width for width in (8, 4, 2, 1) if width * dtype.itemsize <= VECTOR_BYTES]


def translation_unit(variants: Iterable[Variant], hardware: str = HARDWARE) -> str:
    """Return the source of a program with these functions."""
    includes = [f'#include "{name}"\n' for name in (hardware, *SOURCES)]
    return "".join(includes) + "\n" + "\n".join(variant.definition() for variant in variants)


@cache
def headers() -> dict[str, str]:
    """Return the files that a translation unit includes, by name."""
    return {name: (FOLDER / name).read_text("utf-8") for name in (HARDWARE, *SOURCES)}
