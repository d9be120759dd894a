"""Loading cubins and launching their kernels on torch's current stream, through the CUDA driver's own interface.

A launch neither waits for the device nor allocates, so it may be captured in a CUDA graph; a kernel's first launch on a
device compiles and loads it, which capture does not allow: call it once before.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from flashqsa.kernels.nvrtc.compiler import Source, compile_source

SUCCESS = 0

BUFFER_POINTER, BUFFER_SIZE, PARAMETERS_END = 1, 2, 0
"""CU_LAUNCH_PARAM_*: a kernel's parameters are handed over as one packed buffer."""

MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""

NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
"""CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED."""

PORTABLE_CLUSTER = 8
"""Programs of the largest cluster that every device with clusters has."""

CLUSTER_DIMENSION = 4
"""CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION."""

DEFAULT_SHARED_BYTES = 48 << 10
"""Shared memory a program may have without asking for more."""


class DriverError(RuntimeError):
    """The CUDA driver refused a call; the message has its name for the error and its explanation."""


@dataclass(frozen=True)
class Kernel:
    """One `__global__` function of a source, for one kind of device.

    source        what it is compiled from
    function      its name there (`extern "C"`)
    parameters    their types in order, as codes of the `struct` module: P pointer, q int64, i int32, f float
    capability    compute capability of the device, as `DeviceFacts` has it
    threads       of a program (a CUDA thread block)
    shared_bytes  dynamic shared memory of a program
    cluster       neighbouring programs that run at once and reach each other's shared memory (sm_90 and newer)
    loaded        where it is loaded already, by the number of the device

    >>> Kernel(Source("topk.cu"), "segment_maxima", "PqPPqii", (9, 0), threads=256).packing.size
    48
    """

    source: Source
    function: str
    parameters: str
    capability: tuple[int, int]
    threads: int
    shared_bytes: int = 0
    cluster: int = 1
    loaded: dict[int, Loaded] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def packing(self) -> struct.Struct:
        """Lays parameters out as the kernel expects them: each at a multiple of its size."""
        return struct.Struct(f"@{self.parameters}")

    def prepare(self, device: torch.device) -> None:
        """Compiles and loads it where that was not done, so that the next launch may be captured in a CUDA graph.

        Raises CompileError, NvrtcNotFoundError, DriverError.
        """
        with torch.cuda.device(device):
            self._on(torch.cuda.current_device())

    def _on(self, index: int) -> Loaded:
        found = self.loaded.get(index)
        if found is None:
            # Kernels that are equal share what is loaded: a decode step looks into this dictionary, not into the cache.
            found = self.loaded[index] = _loaded(self, index)
        return found

    def launch(self, device: torch.device, programs: int, *arguments: int | float) -> None:
        """Launches it on the device's current stream.

        device     the tensors' device
        programs   how many, in one dimension (at most 2^31 - 1; none is no launch), whole clusters
        arguments  for `parameters`; a tensor is passed by its `data_ptr()`

        Raises CompileError, NvrtcNotFoundError, DriverError.
        """
        if programs == 0:
            return
        current = torch.cuda.current_device()
        if device.index is None or device.index == current:
            self._on(current).launch(programs, _current_stream(current), *arguments)
            return
        with torch.cuda.device(device):
            self._on(device.index).launch(programs, _current_stream(device.index), *arguments)


def _current_stream(index: int) -> int:
    """The driver's handle of torch's current stream; a tenth of the time that `torch.cuda.current_stream` takes."""
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    return stream


@dataclass(frozen=True)
class Loaded:
    """A kernel that is loaded on one device: the driver's `context` and `handle`, and the `size` of its parameters."""

    kernel: Kernel
    packing: struct.Struct
    context: ctypes.c_void_p
    handle: ctypes.c_void_p
    size: ctypes.c_size_t

    def launch(self, programs: int, stream: int, *arguments: int | float) -> None:
        """Launches it on a stream of its device."""
        packed = self.packing.pack(*arguments)
        extra = _Extra(
            BUFFER_POINTER,
            ctypes.cast(ctypes.c_char_p(packed), ctypes.c_void_p),
            BUFFER_SIZE,
            ctypes.addressof(self.size),
            PARAMETERS_END,
        )
        kernel, driver = self.kernel, _driver()
        # A thread that has not called the CUDA runtime yet has no current context.
        status = driver.cuCtxSetCurrent(self.context)
        if status == SUCCESS and kernel.cluster > 1:
            config = _cluster_launch(kernel, programs, stream)
            status = driver.cuLaunchKernelEx(ctypes.byref(config), self.handle, None, extra)
        elif status == SUCCESS:
            status = driver.cuLaunchKernel(
                self.handle, programs, 1, 1, kernel.threads, 1, 1, kernel.shared_bytes, _Pointer(stream), None, extra
            )
        if status != SUCCESS:
            _check(f"launch of {kernel.function}, {programs} programs", status)


_Extra = ctypes.c_void_p * 5
_Pointer = ctypes.c_void_p


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute with a CUlaunchAttributeValue of 64 bytes that begins with three dimensions."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("dims", ctypes.c_uint * 3),
        ("rest", ctypes.c_char * 52),
    )


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((f"grid_{axis}", ctypes.c_uint) for axis in "xyz"),
        *((f"block_{axis}", ctypes.c_uint) for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


@cache
def _of_clusters(cluster: int) -> ctypes._Pointer[_Attribute]:
    """What tells the driver that a launch's programs form clusters."""
    return ctypes.pointer(_Attribute(CLUSTER_DIMENSION, 0, (cluster, 1, 1)))


def _cluster_launch(kernel: Kernel, programs: int, stream: int) -> _Config:
    """A launch of programs that form clusters, as the driver is told of it."""
    attributes = _of_clusters(kernel.cluster)
    return _Config(programs, 1, 1, kernel.threads, 1, 1, kernel.shared_bytes, stream, attributes, 1)


def call(name: str, device_index: int, *arguments: Any, allowed: tuple[int, ...] = ()) -> int:
    """Calls a function of the driver in a device's context, and returns its status: success, or one of `allowed`.

    Raises DriverError for any other, and where the driver has no such function.
    """
    driver = _driver()
    function = getattr(driver, name, None)
    if function is None:
        raise DriverError(f"{name}: this driver has no such function")
    # What torch takes for the current device is the current context's.
    with torch.cuda.device(device_index):
        _check("cuCtxSetCurrent", driver.cuCtxSetCurrent(_context(device_index)))
        status: int = function(*arguments)
    if status not in allowed:
        _check(name, status)
    return status


@cache
def _driver() -> ctypes.CDLL:
    """The driver's library. Raises OSError where there is none."""
    return ctypes.CDLL("libcuda.so.1")


@cache
def _context(device_index: int) -> ctypes.c_void_p:
    """The context that torch uses on a device: its primary one. Kept as long as the process lives."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    torch.cuda.current_stream(device_index)  # sets CUDA up where nothing did
    _check("cuDeviceGet", _driver().cuDeviceGet(ctypes.byref(device), device_index))
    _check("cuDevicePrimaryCtxRetain", _driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    return context


@cache
def _loaded(kernel: Kernel, device_index: int) -> Loaded:
    compiled = compile_source(kernel.source, kernel.capability)
    context, driver = _context(device_index), _driver()
    _check("cuCtxSetCurrent", driver.cuCtxSetCurrent(context))
    module, handle = ctypes.c_void_p(), ctypes.c_void_p()
    _check(f"loading {kernel.source.name}", driver.cuModuleLoadData(ctypes.byref(module), compiled.cubin))
    status = driver.cuModuleGetFunction(ctypes.byref(handle), module, kernel.function.encode())
    _check(f"{kernel.function} in {kernel.source.name}", status)
    if kernel.shared_bytes > DEFAULT_SHARED_BYTES:
        status = driver.cuFuncSetAttribute(handle, MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel.shared_bytes)
        _check(f"{kernel.shared_bytes} bytes of shared memory for {kernel.function}", status)
    if kernel.cluster > PORTABLE_CLUSTER:
        status = driver.cuFuncSetAttribute(handle, NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        _check(f"clusters of {kernel.cluster} programs for {kernel.function}", status)
    packing = kernel.packing
    return Loaded(kernel, packing, context, handle, ctypes.c_size_t(packing.size))


def _check(action: str, status: int) -> None:
    if status == SUCCESS:
        return
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    _driver().cuGetErrorName(status, ctypes.byref(name))
    _driver().cuGetErrorString(status, ctypes.byref(text))
    raise DriverError(f"{action}: {(name.value or b'?').decode()} ({status}): {(text.value or b'').decode()}")
