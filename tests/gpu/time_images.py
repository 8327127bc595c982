"""Time the loader or the whole loop on drawn images: python -m tests.gpu.time_images OUT.json loader|end2end FOLDER [--tiny]

loader: times batches alone, and samples how busy the GPU's JPEG engine is. end2end: times the real loop, the parts of its step,
and the same step alone. FOLDER: images of tests.gpu.make_set.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace

from tests.gpu.part import Line, Task, main
from tests.gpu.time_step import RECIPE, TINY
from trainer.bench.end2end import bench_end2end
from trainer.bench.loader import bench_loader
from trainer.bench.timing import spread
from trainer.config.schema import Config
from trainer.loop import train

SAMPLE = ["nvidia-smi", "--query-gpu=utilization.jpeg", "--format=csv,noheader,nounits", "--loop-ms=200"]


def time_images(task: Task) -> Iterator[Line]:
    """Yield the lines of the measurement that the command names."""
    kind, folder = task.words
    config = TINY if task.tiny else RECIPE
    data = replace(config.data, root=folder)
    log = replace(config.log, tensorboard=False)
    config = replace(config, data=data, log=log)
    measure = loader if kind == "loader" else end2end
    yield from measure(config, task)


def loader(config: Config, task: Task) -> Iterator[Line]:
    """Yield the views per second, and the utilisation of the JPEG engine meanwhile."""
    # Sample the utilisation in another process while the loader runs.
    try:
        samples = subprocess.Popen(SAMPLE, stdout=subprocess.PIPE, text=True)
    except FileNotFoundError:
        samples = None
    result = bench_loader(config, 0.5 if task.tiny else 16.0)
    yield {"name": "loader", "said": f"{result['views_per_s']:,.0f} views/s", **result}
    if samples is None:
        return
    samples.terminate()
    output, _ = samples.communicate()
    # Cards without a JPEG engine give no numbers.
    percent = [float(line) for line in output.splitlines() if line.strip().isdigit()]
    if len(percent) > 1:
        figure = spread(percent)
        yield {"name": "JPEG engine", "said": f"{figure['median']:.0f} % busy", "percent": figure}


def end2end(config: Config, task: Task) -> Iterator[Line]:
    """Yield the views per second of the loop, their share of the step alone, and the parts of a profiled step."""
    result = bench_end2end(config, 1.0 if task.tiny else 40.0, train)
    assert result is not None
    said = f"{result['views_per_s']:,.0f} views/s, {result['share_of_compute']:.0%} of the step alone"
    yield {"name": "end2end", "said": said, **result}
    # Name the parts that take at least 1 %.
    percent = result["step"]["percent"]
    parts = [f"{name} {round(value, 1)}" for name, value in percent.items() if value >= 1]
    yield {"name": "a step's percent", "said": ", ".join(parts)}


if __name__ == "__main__":
    main(time_images, __doc__)
