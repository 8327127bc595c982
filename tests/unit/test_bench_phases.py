"""Where a step's time goes: ranges of the host, kernels of the device by the range that launched them."""

from dataclasses import dataclass

import pytest
import torch
from torch.autograd import DeviceType

from tests.unit.test_step import build, pixels
from trainer.bench.compute import percent_of
from trainer.bench.phases import PHASES, covered_ns, device_ms, host_ms, profile_steps


@dataclass
class Event:
    """As torch's profiler gives them; times in ms."""

    label: str
    begin: float
    length: float
    on_gpu: bool = False
    annotation: bool = False
    correlation: int = 0
    linked: int = 0
    stream: int = 7

    def name(self) -> str:
        return self.label

    def device_type(self) -> DeviceType:
        return DeviceType.CUDA if self.on_gpu else DeviceType.CPU

    def is_user_annotation(self) -> bool:
        return self.annotation

    def start_ns(self) -> int:
        return int(self.begin * 1e6)

    def duration_ns(self) -> int:
        return int(self.length * 1e6)

    def correlation_id(self) -> int:
        return self.correlation

    def linked_correlation_id(self) -> int:
        return self.linked

    def device_resource_id(self) -> int:
        return self.stream


def kernel(name: str, launched: float, begin: float, length: float, number: int, **more: int) -> list[Event]:
    launch = Event("cudaLaunchKernel", launched, 0.01, correlation=number)
    return [launch, Event(name, begin, length, on_gpu=True, correlation=number, **more)]


def test_time_that_spans_cover_counts_once() -> None:
    assert covered_ns([(0, 4), (2, 6), (10, 11), (10, 11), (3, 4)]) == 7
    assert covered_ns([]) == 0


def test_phases_of_the_host() -> None:
    events = [
        Event("forward", 0, 2, annotation=True),
        Event("forward", 10, 4, annotation=True),
        Event("backward", 2, 5, annotation=True),
        Event("forward", 0, 99),  # an operator of that name
        Event("forward", 0, 99, on_gpu=True, annotation=True),  # the profiler's copy on the device
        Event("elsewhere", 0, 99, annotation=True),
    ]
    assert host_ms(events, 2) == {"forward": 3, "loss": 0, "backward": 2.5, "agree": 0, "update": 0}


def test_a_kernel_belongs_to_the_range_that_launched_it() -> None:
    """The device runs behind the host: a kernel of forward runs while the host is in backward."""
    events = [
        Event("forward", 0, 2, annotation=True),
        Event("backward", 2, 5, annotation=True),
        Event("aten::convolution_backward", 3, 1, correlation=1),  # an operator's number is no launch's
        *kernel("conv", 1, 3, 4, 1, linked=11),
        Event("aten::convolution_backward", 3, 1, correlation=1),
        *kernel("triton", 1.5, 6, 3, 2),  # beside conv for 1 ms; of no torch operator, on torch's stream
        *kernel("conv_backward", 3, 9, 5, 3, linked=12),
        *kernel("copy", 8, 14, 1, 4, linked=13),
        *kernel("ncclDevKernel_AllReduce", 4, 10, 2, 5, linked=14, stream=20),
        *kernel("resample", 3, 0, 2, 6, stream=30),
    ]
    busy = device_ms(events, 1)
    assert busy == {"forward": 6, "loss": 0, "backward": 5, "agree": 0, "update": 0, "outside": 1, "all_reduce": 2,
                    "augmentation": 2, "busy": 2 + 12}  # fmt: skip


def test_phases_of_a_real_step() -> None:
    step = build()
    step(pixels(1), 0, 0.1)
    took: list[float] = []

    def timed_step() -> None:
        import time

        began = time.perf_counter()
        step(pixels(1), 0, 0.1)
        took.append(1e3 * (time.perf_counter() - began))

    found = host_ms(profile_steps(timed_step, 2, torch.device("cpu")), 2)
    assert list(found) == list(PHASES)
    assert all(ms > 0 for ms in found.values())
    assert 0.5 * sum(took) / 2 < sum(found.values()) < sum(took) / 2
    assert sum(percent_of(found, sum(found.values())).values()) == pytest.approx(100)
