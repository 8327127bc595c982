"""Training on drawn pictures: python -m tests.gpu.time_images OUT.json loader|end2end FOLDER [--tiny]

loader: batches alone, and how busy that keeps the GPU's JPEG engine. end2end: the real loop, where the time of a step goes,
and the same step alone. FOLDER: from tests.gpu.make_set.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from dataclasses import replace

import torch

from tests.gpu.part import Line, Task, main
from tests.gpu.time_step import RECIPE, TINY
from trainer.bench.end2end import bench_end2end
from trainer.bench.loader import bench_loader
from trainer.bench.timing import spread
from trainer.config.schema import Config
from trainer.loop import train

SAMPLE_SECONDS = 0.2


class JpegEngine(threading.Thread):
    """Asks NVIDIA's management library, while it runs, how busy the JPEG engine is -> `percent`, samples; `problem`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(daemon=True)
        self.percent: list[float] = []
        self.problem = "" if device.type == "cuda" else "there is no GPU"
        self._over = threading.Event()

    def run(self) -> None:
        """Until `stop`."""
        if self.problem:
            return
        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
            handle, percent, period = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
            uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}".encode()
            codes = nvml.nvmlInit_v2(), nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle))
            while not any(codes) and not self._over.wait(SAMPLE_SECONDS):
                codes = (nvml.nvmlDeviceGetJpgUtilization(handle, ctypes.byref(percent), ctypes.byref(period)),)
                self.percent.append(float(percent.value))
            self.problem = f"NVML says {codes}" if any(codes) else ""
        except (OSError, AttributeError) as error:  # no library, or one older than the function
            self.problem = str(error)

    def stop(self) -> Line:
        """-> what was seen."""
        self._over.set()
        self.join()
        if len(self.percent) < 2 or self.problem:
            return {"name": "JPEG engine", "said": f"not seen: {self.problem or 'too short'}"}
        figure = spread(self.percent)
        return {"name": "JPEG engine", "said": f"{figure['median']:.0f} % busy", "percent": figure}


def time_images(task: Task) -> Iterator[Line]:
    """Lines of the one that is named."""
    kind, folder = task.words
    config = TINY if task.tiny else RECIPE
    config = replace(config, data=replace(config.data, root=folder), log=replace(config.log, tensorboard=False))
    yield from (loader if kind == "loader" else end2end)(config, task)


def loader(config: Config, task: Task) -> Iterator[Line]:
    """Views a second, and the JPEG engine meanwhile."""
    engine = JpegEngine(task.device)
    engine.start()
    result = bench_loader(config, 0.5 if task.tiny else 16.0)
    yield {"name": "loader", "said": f"{result['views_per_s']:,.0f} views/s", **result}
    yield engine.stop()


def end2end(config: Config, task: Task) -> Iterator[Line]:
    """Views a second of the loop, its share of the step alone, and the parts of a profiled step."""
    result = bench_end2end(config, 1.0 if task.tiny else 40.0, train)
    assert result is not None
    said = f"{result['views_per_s']:,.0f} views/s, {result['share_of_compute']:.0%} of the step alone"
    yield {"name": "end2end", "said": said, **result}
    percent = {name: round(value, 1) for name, value in result["step"]["percent"].items() if value >= 1}
    yield {"name": "a step's percent", "said": ", ".join(f"{name} {value}" for name, value in percent.items())}


if __name__ == "__main__":
    main(time_images, __doc__)
