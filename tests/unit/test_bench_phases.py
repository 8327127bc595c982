"""Time of a step by phase: ranges on the host, and kernels on the device by the range that launched them."""

from dataclasses import dataclass
from typing import Any

from torch.autograd import DeviceType

from trainer.bench.end2end import device_parts, host_parts, step_intervals
from trainer.bench.phases import covered_ns, device_ms, host_ms, host_ranges

STEP = ("forward", "loss", "backward", "agree", "update")


@dataclass
class Event:
    """Event with the methods of those of torch's profiler; times are in ms."""

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
    """Return the events of a kernel: its launch on the host and its execution on the device."""
    launch = Event("cudaLaunchKernel", launched, 0.01, correlation=number)
    return [launch, Event(name, begin, length, on_gpu=True, correlation=number, **more)]


def ranges(names: tuple[str, ...]) -> Any:
    """Return the ranges of three steps of 10 ms, each with consecutive ranges of 1 ms."""
    return [Event(name, at + i, 1, annotation=True) for at in (0, 10, 20) for i, name in enumerate(names)]


def test_overlapping_spans_count_once() -> None:
    assert covered_ns([(0, 4), (2, 6), (10, 11), (10, 11), (3, 4)]) == 7
    assert covered_ns([]) == 0


def test_host_phases_are_the_ranges_of_the_host_only() -> None:
    events = [
        Event("forward", 0, 2, annotation=True),
        Event("forward", 10, 4, annotation=True),
        Event("backward", 2, 5, annotation=True),
        Event("forward", 0, 99),  # an operator of that name
        Event("forward", 0, 99, on_gpu=True, annotation=True),  # the profiler's copy on the device
    ]
    assert host_ms(events, 2) == {"forward": 3, "loss": 0, "backward": 2.5, "agree": 0, "update": 0}


def test_a_kernel_belongs_to_the_range_that_launched_it() -> None:
    """The device lags behind the host: a kernel of forward runs while the host is in backward."""
    events = [
        Event("forward", 0, 2, annotation=True),
        Event("backward", 2, 5, annotation=True),
        Event("aten::convolution_backward", 3, 1, correlation=1),  # operators are numbered apart from launches
        *kernel("conv", 1, 3, 4, 1, linked=11),
        *kernel("triton", 1.5, 6, 3, 2),  # overlaps conv for 1 ms; has no torch operator; is on torch's stream
        *kernel("conv_backward", 3, 9, 5, 3, linked=12),
        *kernel("copy", 8, 14, 1, 4, linked=13),
        *kernel("ncclDevKernel_AllReduce", 4, 10, 2, 5, linked=14, stream=20),
        *kernel("resample", 3, 0, 2, 6, stream=30),
    ]
    assert device_ms(events, 1) == {"forward": 6, "loss": 0, "backward": 5, "agree": 0, "update": 0, "outside": 1,
                                    "all_reduce": 2, "augmentation": 2, "busy": 2 + 12}  # fmt: skip


def test_the_parts_of_a_step_on_the_host_add_up_to_it() -> None:
    for names, micro_batches in ((STEP, 1), (("forward", "loss", "backward", *STEP), 2)):
        found = host_ranges(ranges(names))
        intervals = step_intervals(found, 3)
        assert intervals == [(0, 10_000_000), (10_000_000, 20_000_000)]
        parts = host_parts(found, intervals, 0.5)
        assert parts["forward"] == parts["backward"] == micro_batches
        assert (parts["agree"], parts["data_wait"]) == (1, 0.5)
        assert sum(parts.values()) == 10


def test_the_parts_of_a_step_on_a_gpu_add_up_to_it() -> None:
    """Of 20 ms, 15 are busy: 1 of them in the all-reduce alone, 2 in torch outside the ranges. 5 are idle, 3 for data."""
    busy = {"forward": 4.0, "loss": 1.0, "backward": 6.0, "agree": 0.5, "update": 0.5, "outside": 2.0}
    parts = device_parts({**busy, "all_reduce": 3.0, "augmentation": 2.0, "busy": 15.0}, 20.0, 3.0)
    assert (parts["data_wait"], parts["beside"], parts["rest"], parts["idle"]) == (3, 1, 4, 5)
    assert sum(parts[name] for name in ("data_wait", *STEP, "beside", "rest")) == 20
