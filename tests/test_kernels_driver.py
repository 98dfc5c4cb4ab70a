"""The launcher against a stub of the CUDA driver, which runs the kernel sources on the CPU."""

from __future__ import annotations

import ctypes
import enum
import importlib.util
import os
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from bnconvert.kernels import native, nvrtc
from bnconvert.kernels.driver import CudaDriver
from bnconvert.kernels.nvrtc import KernelError
from bnconvert.kernels.variants import Variant, all_variants
from tests.shim.driver import COMPILER, ShimError, build, group_of, load

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

BY_NAME = {v.name: v for v in all_variants()}


class Code(enum.Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209


class StubDriver(types.ModuleType):
    """`cuda.bindings.driver` for one device: launches go to the shim, with the array they got."""

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.calls: list[str] = []
        self.failing: dict[str, Code] = {}
        self.context = 0
        self.streams: list[int] = []
        self.addresses: list[int] = []

    def _result(self, name: str, *values: Any) -> tuple[Any, ...]:
        self.calls.append(name)
        return (self.failing.get(name, Code.CUDA_SUCCESS), *values)

    def cuCtxGetCurrent(self) -> tuple[Any, ...]:  # noqa: N802
        return self._result("cuCtxGetCurrent", self.context)

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:  # noqa: N802
        return self._result("cuDeviceGet", ordinal)

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:  # noqa: N802
        return self._result("cuDevicePrimaryCtxRetain", 77)

    def cuCtxSetCurrent(self, context: int) -> tuple[Any, ...]:  # noqa: N802
        self.context = context
        return self._result("cuCtxSetCurrent")

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, ...]:  # noqa: N802
        return self._result("cuModuleLoadData", image)

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[Any, ...]:  # noqa: N802
        assert module == b"cubin of " + name
        return self._result("cuModuleGetFunction", name.decode())

    def cuLaunchKernel(self, *values: Any) -> tuple[Any, ...]:  # noqa: N802
        function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra = values
        assert (gz, bz, extra) == (1, 1, 0)
        self.streams.append(stream)
        (address,) = (ctypes.c_void_p * 1).from_address(parameters)
        self.addresses.append(int(address or 0))
        variant = BY_NAME[function]
        library = build(group_of(variant))
        size = ctypes.c_size_t.in_dll(ctypes.CDLL(str(library)), f"size_{function}")
        message = load(library, function)(
            (ctypes.c_uint * 2)(gx, gy),
            (ctypes.c_uint * 2)(bx, by),
            shared,
            parameters,
            size.value,
            1,
        )
        if message is not None:
            raise ShimError(message.decode())
        return self._result("cuLaunchKernel")


class Torch:
    """What the launcher asks of torch.cuda, answered for one GPU of sm_90."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream = 5
        self.current = 0
        self.capturing = False
        self.entered: list[Any] = []
        properties = types.SimpleNamespace(multi_processor_count=2, major=9, minor=0)
        for name, value in {
            "get_device_properties": lambda device: properties,
            "current_device": lambda: self.current,
            "is_current_stream_capturing": lambda: self.capturing,
            "device": self.device,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        raw = lambda index: self.stream  # noqa: E731
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", raw, raising=False)

    def device(self, device: torch.device) -> Any:
        self.entered.append(device)
        return threading.Lock()  # a context manager


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubDriver:
    module = StubDriver()
    if importlib.util.find_spec("cuda") is None:
        monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.bindings", types.ModuleType("cuda.bindings"))
    import cuda.bindings

    monkeypatch.setattr(cuda.bindings, "driver", module, raising=False)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", module)
    monkeypatch.setattr(nvrtc, "cubin", lambda v, architecture: b"cubin of " + v.name.encode())
    return module


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Torch:
    return Torch(monkeypatch)


@pytest.fixture
def cuda(stub: StubDriver, gpu: Torch, monkeypatch: pytest.MonkeyPatch) -> CudaDriver:
    driver = CudaDriver(torch.device("cuda", 0))
    driver.device = torch.device("cpu", 0)  # memory that the stub can reach
    return driver


def step(driver: CudaDriver, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    relu = native.Activation("relu")
    sums = native.local_sums(driver, x)
    output, statistics = native.normalize_(
        driver, x, x, None, None, sums, None, None, None, 0.1, 1e-5, relu
    )
    grad = torch.ones_like(x)
    reduced, _, _ = native.backward_sums(driver, grad, x, x, None, None, statistics, relu)
    grad_input, _ = native.backward_input(driver, grad, x, x, None, None, statistics, reduced, relu)
    return output, grad_input


def check_step(driver: CudaDriver) -> None:
    x = torch.randn(6, 5, 4, 4)
    output, grad_input = step(driver, x)
    exact = x.double().requires_grad_()
    normalized = torch.batch_norm(exact, None, None, None, None, True, 0.1, 1e-5, False)
    expected = torch.relu(normalized + x)  # the residual's own gradient is another output
    torch.autograd.backward(expected, torch.ones_like(expected))
    assert exact.grad is not None
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad_input.double(), exact.grad, rtol=1e-5, atol=1e-5)


def test_arguments_arrive_in_every_kernel(cuda: CudaDriver, stub: StubDriver) -> None:
    check_step(cuda)
    assert stub.calls.count("cuLaunchKernel") == 4


def test_arguments_are_aligned_as_the_structures_need(cuda: CudaDriver, stub: StubDriver) -> None:
    step(cuda, torch.randn(6, 5, 4, 4))
    assert all(address % 8 == 0 for address in stub.addresses)


def test_kernels_are_loaded_once_and_launched_on_the_current_stream(
    cuda: CudaDriver, stub: StubDriver, gpu: Torch
) -> None:
    x = torch.randn(6, 5, 4, 4)
    native.local_sums(cuda, x)
    gpu.stream = 9
    native.local_sums(cuda, x)
    assert stub.streams == [5, 9]
    assert stub.calls.count("cuModuleLoadData") == stub.calls.count("cuModuleGetFunction") == 1


def test_each_stream_has_its_own_counters_and_a_captured_launch_too(
    cuda: CudaDriver, gpu: Torch
) -> None:
    first = cuda.counters(3)
    assert cuda.counters(4096) is first
    assert cuda.counters(5000) is not first
    gpu.stream = 6
    other = cuda.counters(3)
    assert other is not cuda.counters(5000)
    gpu.capturing = True
    captured = cuda.counters(3)
    assert captured.tolist() == [0, 0, 0]
    assert cuda.counters(3).data_ptr() != captured.data_ptr()
    gpu.capturing = False
    assert cuda.counters(3) is cuda.counters(4)


def test_another_current_device_is_left_current(
    cuda: CudaDriver, stub: StubDriver, gpu: Torch
) -> None:
    gpu.current = 1
    native.local_sums(cuda, torch.randn(6, 5, 4, 4))
    assert gpu.entered == [cuda.device]
    assert stub.calls.count("cuLaunchKernel") == 1


def test_a_thread_without_a_context_gets_the_devices(cuda: CudaDriver, stub: StubDriver) -> None:
    x = torch.randn(6, 5, 4, 4)
    native.local_sums(cuda, x)
    assert stub.context == 77
    native.local_sums(cuda, x)
    assert stub.calls.count("cuCtxGetCurrent") == stub.calls.count("cuCtxSetCurrent") == 1
    thread = threading.Thread(target=native.local_sums, args=(cuda, x))
    thread.start()
    thread.join()
    assert stub.calls.count("cuCtxGetCurrent") == 2
    assert stub.calls.count("cuCtxSetCurrent") == 1  # the stub has one for all threads


@pytest.mark.parametrize(
    "call",
    [
        "cuCtxGetCurrent",
        "cuDeviceGet",
        "cuDevicePrimaryCtxRetain",
        "cuCtxSetCurrent",
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuLaunchKernel",
    ],
)
def test_every_error_code_is_reported(cuda: CudaDriver, stub: StubDriver, call: str) -> None:
    stub.failing[call] = Code.CUDA_ERROR_NO_BINARY_FOR_GPU
    with pytest.raises(KernelError, match="the CUDA driver reports CUDA_ERROR_NO_BINARY_FOR_GPU"):
        native.local_sums(cuda, torch.randn(6, 5, 4, 4))
    assert stub.calls[-1] == call
    stub.failing.clear()
    native.local_sums(cuda, torch.randn(6, 5, 4, 4))


def test_threads_load_a_kernel_once(cuda: CudaDriver, stub: StubDriver) -> None:
    variant = Variant("stats", torch.float32, False, 4)
    threads = [threading.Thread(target=cuda._load, args=(variant,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stub.calls.count("cuModuleLoadData") == 1


def test_architecture_is_that_of_the_device(cuda: CudaDriver) -> None:
    assert (cuda.architecture, cuda.multiprocessors) == (90, 2)


def run_on_the_bindings() -> None:
    """In a process whose libcuda.so.1 is the stub: check all kernels, through `cuda.bindings`."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        Torch(monkeypatch)

        def path_of(variant: Variant, architecture: int) -> bytes:
            return bytes(build(group_of(variant))) + b"\0"

        monkeypatch.setattr(nvrtc, "cubin", path_of)
        driver = CudaDriver(torch.device("cuda", 0))
        driver.device = torch.device("cpu", 0)
        check_step(driver)
        monkeypatch.setattr(nvrtc, "cubin", lambda *_: b"/no/such/library\0")
        with pytest.raises(KernelError, match="the CUDA driver reports CUDA_ERROR_INVALID_IMAGE"):
            native.local_sums(driver, torch.randn(8, 4))


@pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None,
    reason="this torch comes without cuda.bindings, as its CPU wheels do",
)
def test_the_bindings_pass_everything_on_to_a_driver_library(tmp_path: Path) -> None:
    source = Path(__file__).parent / "shim" / "libcuda.c"
    command = [str(COMPILER), "-x", "c", "-shared", "-fPIC", str(source), "-ldl"]
    subprocess.run([*command, "-o", str(tmp_path / "libcuda.so.1")], check=True)  # noqa: S603
    code = "from tests import test_kernels_driver as t; t.run_on_the_bindings(); print('done')"
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    result = subprocess.run(  # noqa: S603
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == "done", result.stderr[-3000:]
