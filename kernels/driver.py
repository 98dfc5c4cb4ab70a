"""Loads compiled kernels and launches them on torch's current stream, through the CUDA driver."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bnconvert.kernels import nvrtc
from bnconvert.kernels.nvrtc import KernelError

if TYPE_CHECKING:
    from bnconvert.kernels.variants import Variant

_FEWEST_COUNTERS = 4096


class CudaDriver:
    """A `native.Driver` of one GPU.

    Attributes:
        device: The GPU.
        multiprocessors: Their number.
        architecture: Compute capability without its dot, 90 for sm_90.
    """

    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import driver as cuda

        properties = torch.cuda.get_device_properties(device)
        self.device = device
        self.multiprocessors: int = properties.multi_processor_count
        self.architecture = 10 * properties.major + properties.minor
        self._cuda: Any = cuda
        self._functions: dict[Variant, Any] = {}
        self._modules: list[Any] = []
        self._counters: dict[int, Tensor] = {}
        self._lock = threading.Lock()
        self._thread = threading.local()

    def counters(self, count: int) -> Tensor:
        """Return at least `count` zeroed counters of the current stream.

        A stream runs one kernel after another, so its kernels share them. A CUDA graph may be
        replayed on any stream, beside other work: each of its launches gets counters of its own.
        """
        if torch.cuda.is_current_stream_capturing():
            return torch.zeros(count, dtype=torch.int32, device=self.device)
        stream = self._stream()
        kept = self._counters.get(stream)
        if kept is None or kept.numel() < count:
            size = max(count, _FEWEST_COUNTERS)
            kept = torch.zeros(size, dtype=torch.int32, device=self.device)
            self._counters[stream] = kept
        return kept

    def launch(
        self,
        variant: Variant,
        grid: tuple[int, int],
        block: tuple[int, int],
        shared_bytes: int,
        arguments: bytes,
    ) -> None:
        """Start a kernel on the current stream of the device.

        Raises:
            KernelError: The kernel does not compile, or the driver reports an error.
        """
        if torch.cuda.current_device() == self.device.index:
            self._launch(variant, grid, block, shared_bytes, arguments)
        else:
            with torch.cuda.device(self.device):
                self._launch(variant, grid, block, shared_bytes, arguments)

    def _launch(
        self,
        variant: Variant,
        grid: tuple[int, int],
        block: tuple[int, int],
        shared_bytes: int,
        arguments: bytes,
    ) -> None:
        self._enter_context()
        function = self._functions.get(variant) or self._load(variant)
        # The driver copies the structure during the call; the array holds a pointer to it.
        buffer = ctypes.create_string_buffer(arguments, len(arguments))
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        self._checked(
            self._cuda.cuLaunchKernel(
                function,
                *grid,
                1,
                *block,
                1,
                shared_bytes,
                self._stream(),
                ctypes.addressof(parameters),
                0,
            ),
            variant.name,
        )

    def _stream(self) -> int:
        return int(torch._C._cuda_getCurrentRawStream(self.device.index))

    def _enter_context(self) -> None:
        """Make the device's context current in a thread in which torch has not used it yet."""
        if getattr(self._thread, "entered", False):
            return
        if not int(self._checked(self._cuda.cuCtxGetCurrent(), "cuCtxGetCurrent")):
            device = self._checked(self._cuda.cuDeviceGet(self.device.index), "cuDeviceGet")
            context = self._checked(self._cuda.cuDevicePrimaryCtxRetain(device), "context")
            self._checked(self._cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")
        self._thread.entered = True

    def _load(self, variant: Variant) -> Any:
        """Compile and load a variant, once; the module stays loaded as long as the process."""
        with self._lock:
            if variant not in self._functions:
                code = nvrtc.cubin(variant, self.architecture)
                module = self._checked(self._cuda.cuModuleLoadData(code), variant.name)
                self._modules.append(module)
                self._functions[variant] = self._checked(
                    self._cuda.cuModuleGetFunction(module, variant.name.encode()), variant.name
                )
            return self._functions[variant]

    def _checked(self, result: tuple[Any, ...], what: str) -> Any:
        """Return what a driver function gave besides its result code."""
        error, *values = result
        if error.value != 0:
            raise KernelError(f"{what}: the CUDA driver reports {error.name}")
        return values[0] if values else None
