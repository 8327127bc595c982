"""Cost of a run: counters of energy, ranks, restarts, prices."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainer.config.cost import CostConfig
from trainer.distributed.ranks import Ranks
from trainer.methods.wmse.method import WMSE
from trainer.metrics import DelayedMetrics, MetricSums
from trainer.run import cost
from trainer.run.cost import Counter, EnergyMeter, RunCost, describe_cost, open_meter
from trainer.step import RankFlags

NO_FLAGS = RankFlags(*torch.zeros(3, dtype=torch.int32).unbind())
GPU = torch.device("cuda", 0)


class Time:
    """Clock that the test sets."""

    now = 50.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    hand = Time()
    monkeypatch.setattr(cost, "time", hand)
    monkeypatch.setattr(cost, "own_cores", lambda: 4)
    return hand


def write_zone(powercap: Path, number: str, name: str, energy: int) -> Path:
    """Write the files of an energy counter that wraps around at 1,000,000 microjoules."""
    zone = powercap / f"intel-rapl:{number}"
    zone.mkdir(parents=True, exist_ok=True)
    (zone / "name").write_text(f"{name}\n")
    (zone / "max_energy_range_uj").write_text("1000000\n")
    (zone / "energy_uj").write_text(f"{energy}\n")
    return zone / "energy_uj"


def test_processors_are_added_up_and_wrap_around(tmp_path: Path) -> None:
    files = [write_zone(tmp_path, str(number), f"package-{number}", 900_000) for number in (0, 1)]
    for number, name in (("0:0", "core"), ("2", "psys")):
        write_zone(tmp_path, number, name, 0)
    meter = open_meter(None, Ranks(), tmp_path)
    assert meter.source == "RAPL"
    for file, energy in zip(files, (950_000, 100_000), strict=True):
        file.write_text(f"{energy}\n")
    for zone in tmp_path.glob("intel-rapl:*"):  # parts and the whole machine do not count
        if zone.name in ("intel-rapl:0:0", "intel-rapl:2"):
            (zone / "energy_uj").write_text("700000\n")
    meter.read()
    assert meter.joules == pytest.approx(0.05 + 0.2)
    meter.read()
    assert meter.joules == pytest.approx(0.25)
    files[0].write_text("150000\n")
    meter.read()
    assert meter.joules == pytest.approx(0.25 + 0.2)
    assert meter.unmeasured_seconds == 0


def test_only_one_rank_of_a_node_counts_its_processors(tmp_path: Path) -> None:
    file = write_zone(tmp_path, "0", "package-0", 0)
    meters = [open_meter(None, Ranks(rank, 4, rank % 2, 2), tmp_path) for rank in range(4)]
    file.write_text("500000\n")
    for meter in meters:
        meter.read()
    assert [meter.joules for meter in meters] == [0.5, 0, 0.5, 0]
    assert [meter.unmeasured_seconds for meter in meters] == [0, 0, 0, 0]


def test_a_missing_counter_gives_the_reason(tmp_path: Path, clock: Time) -> None:
    meter = open_meter(None, Ranks(), tmp_path)
    clock.now += 7
    meter.read()
    assert (meter.joules, meter.unmeasured_seconds) == (0, 7)
    assert meter.source == f"not available: this machine shows no energy counters in {tmp_path}"


def test_a_counter_that_fails_later_is_unmeasured_from_then_on(clock: Time, caplog: pytest.LogCaptureFixture) -> None:
    values = iter([0, 5])
    meter = EnergyMeter([Counter(lambda: next(values), 1.0)], "RAPL")
    meter.read()
    for _ in range(2):
        clock.now += 3
        meter.read()
    assert (meter.joules, meter.unmeasured_seconds) == (5, 3)
    assert meter.source.startswith("not available")
    assert len(caplog.records) == 1


def test_a_gpu_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    millijoules = {"GPU-ab-c": [1000, 4500]}
    fake = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: millijoules[uuid],
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: handle.pop(0),
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="ab-c"))
    meter = open_meter(GPU, Ranks(1, 2, 1, 2))
    meter.read()
    assert (meter.source, meter.joules) == ("NVML", 3.5)


def test_without_the_package_of_nvml_the_energy_of_a_gpu_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py is not installed" in open_meter(GPU, Ranks()).source


def account(world_size: int = 1, prices: CostConfig | None = None) -> tuple[RunCost, list[int]]:
    """Return the account of a run on GPUs, and a list whose first number is the counter of rank 0 in joules."""
    energy = [0]
    meter = EnergyMeter([Counter(lambda: energy[0], 1.0)], "NVML")
    return RunCost(Ranks(0, world_size), GPU, prices, meter), energy


def test_energy_of_two_ranks_is_the_sum_of_both(clock: Time) -> None:
    run, energy = account(2)
    clock.now += 10
    energy[0] = 30
    own = run.own()
    # The other rank has spent 12 J, and has no counter for 4 s.
    late = DelayedMetrics(0)
    taken = MetricSums(WMSE.metrics, torch.device("cpu")).take(torch.randn(8, 3), Ranks(), spent=own)
    late.add(1, NO_FLAGS, {"own_spent": own}, taken)
    (record,) = late.ready()
    run.add_line(record | {"joules": record["joules"] + 12, "unmeasured_seconds": record["unmeasured_seconds"] + 4})
    energy[0] = 35  # since the line
    run.own()
    found = run.content()
    assert (found["gpu_seconds"], found["core_seconds"]) == (20, 0)
    assert (found["joules"], found["unmeasured_seconds"]) == (47, 4)


def test_hours_of_a_cpu_are_those_of_its_cores(clock: Time, tmp_path: Path) -> None:
    run = RunCost(Ranks(0, 2), None, None, open_meter(None, Ranks(), tmp_path))
    clock.now += 10
    assert run.content()["core_seconds"] == 80
    run.own()
    assert describe_cost(run.content()).startswith("0.0222 core-hours, energy not available: this machine")


def spend(clock: Time, before: object, at_checkpoint: object, seconds: float, *, checkpoint: bool = True) -> RunCost:
    """Start a run again after state.json and checkpoint, and let it run."""
    run, energy = account()
    run.continue_from(before)
    run.resumed(at_checkpoint, from_checkpoint=checkpoint)
    clock.now += seconds
    energy[0] += int(10 * seconds)
    run.own()
    return run


def test_work_after_the_checkpoint_of_a_restart_counts_as_repeated(clock: Time) -> None:
    first = spend(clock, None, None, 10, checkpoint=False)
    saved = first.content()
    assert saved["repeated"]["gpu_seconds"] == 0
    killed = spend(clock, saved, saved, 5).content()  # a start that continues without any loss
    assert (killed["gpu_seconds"], killed["repeated"]["gpu_seconds"]) == (15, 0)
    # Two starts in a row resume from the checkpoint after 10 s.
    again = spend(clock, killed, saved, 4).content()
    assert (again["gpu_seconds"], again["repeated"]["gpu_seconds"], again["repeated"]["joules"]) == (19, 5, 50)
    third = spend(clock, again, saved, 1).content()
    assert (third["gpu_seconds"], third["joules"], third["repeated"]["gpu_seconds"]) == (20, 200, 9)
    # A later checkpoint keeps what was repeated before it.
    last = spend(clock, third, third, 1).content()
    assert (last["gpu_seconds"], last["repeated"]["gpu_seconds"]) == (21, 9)


def test_without_a_checkpoint_everything_is_repeated(clock: Time) -> None:
    first = spend(clock, None, None, 10, checkpoint=False).content()
    second = spend(clock, first, None, 3, checkpoint=False).content()
    assert (second["gpu_seconds"], second["repeated"]["gpu_seconds"]) == (13, 10)


@pytest.mark.parametrize("state", [None, "damaged", {"gpu_seconds": "x", "joules": -5}, {"gpu_seconds": 7.0}])
def test_a_checkpoint_newer_than_the_state_counts(clock: Time, state: object) -> None:
    saved = spend(clock, None, None, 10, checkpoint=False).content()
    found = spend(clock, state, saved, 1).content()
    assert (found["gpu_seconds"], found["joules"], found["repeated"]["gpu_seconds"]) == (11, 110, 0)


def test_a_checkpoint_of_an_older_program_has_no_account(clock: Time) -> None:
    found = spend(clock, {"gpu_seconds": 8.0}, None, 1).content()
    assert (found["gpu_seconds"], found["repeated"]["gpu_seconds"]) == (9, 0)


def test_the_price_and_the_description(clock: Time) -> None:
    run, energy = account(1, CostConfig(price_per_device_hour=2.0, price_per_kwh=0.5, currency="EUR"))
    run.continue_from({"repeated": {"gpu_seconds": 1800.0, "joules": 1.8e6}})
    clock.now += 3600
    energy[0] = 7_200_000
    run.own()
    assert run.content()["price"] == {"amount": 3.0, "currency": "EUR", "without_all_energy": False}
    assert (
        describe_cost(run.content())
        == "1 GPU-hours, 2 kWh, 3 EUR; 0.5 GPU-hours and 0.5 kWh of it again after restarts"
    )
    run.add_line({"own_spent": (0.0, 0.0), "joules": 0.0, "unmeasured_seconds": 5.0})
    assert "at least 2 kWh, at least 3 EUR" in describe_cost(run.content())
    assert account()[0].content()["price"] is None
    assert describe_cost(None) == describe_cost({}) == ""
