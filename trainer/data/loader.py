"""The loader reads the files of coming steps in advance, lets DALI draw their views, and returns them as one tensor.

Reader threads -> one thread that checks the bytes and computes the graph's inputs -> DALI -> view-major buffer.

A file that is not an image never reaches DALI. A skipped image is logged once, and the next image of the data set replaces it.
The replacement depends on the files alone, so that it is the same after every restart and for any number of ranks.

Shapes: N images of this rank in the step, d views, size S.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.config.schema import DataConfig, ViewsConfig
from trainer.data.dali_graph import Placement, eval_arrays, eval_recipe, view_arrays, view_pipeline
from trainer.data.decode_cache import DecodeCache
from trainer.data.decoding import (
    decode,
    decode_batch_on_gpu,
    decode_by_dali,
    decode_by_torchcodec,
    import_torchcodec,
)
from trainer.data.image_probe import decode_rgb
from trainer.data.index import Index
from trainer.data.plan import Plan, Planner
from trainer.data.printable import printable
from trainer.data.quarantine import SkippedImages, read_quarantine
from trainer.data.reader import ImageReader
from trainer.data.row_choices import row_choices, rows_digest
from trainer.data.stage_times import Waits, split_waits
from trainer.distributed.cores import own_cores
from trainer.errors import InputError

GPU_THREADS = 8  # DALI's CPU threads on a GPU, where the JPEG engine decodes and the SMs do the rest
HELD_BATCHES = 3  # batches that a GPU may still be copying; a training loop reads its results two steps late
RESERVED_BYTES = 2 << 30  # decoder buffers of a batch that may be allocated at the start
_SAMPLED_IMAGES = 4  # decoded alone now and then, to know the decoder's part of DALI's time
_SAMPLED_SHARE = 0.002  # of the time of the thread that prepares the steps
_DALI_BY_PILLOW = 0.7  # measured: the time of DALI's decoder on a CPU by that of Pillow's, for photographs

_log = logging.getLogger(__name__)


class Request(NamedTuple):
    """The images of a step, and the function that computes the inputs for their views."""

    image_ids: NDArray[np.int64]  # (N,)
    arrays: Callable[[NDArray, NDArray], list[NDArray]]  # heights, widths (N,) -> the graph's inputs after the images
    # images shown, heights, widths (N,) -> digest of the rows; None: not wanted
    digest: Callable[[NDArray, NDArray, NDArray], int] | None = None


class Batch(NamedTuple):
    """One batch of views. The next batch overwrites `views`."""

    step: int
    views: torch.Tensor  # (d*N, 3, S, S) uint8 (or normalised, of the loader's views_dtype), channels_last, view-major
    image_ids: NDArray[np.int64]  # (N,) images shown; differs from the request where an image was replaced
    wait_seconds: float  # how long the caller waited for the batch
    rows_digest: int = 0  # sum of the hashes of the rows, see `row_choices`; 0 if the request asks for none
    input_seconds: float = 0.0  # part of wait_seconds in which DALI had no inputs: files were read or checked


class Prepared(NamedTuple):
    """The inputs of DALI's graph for one step."""

    step: int
    image_ids: NDArray[np.int64]
    arrays: list[Any]
    rows_digest: int = 0
    choices: NDArray[np.float32] | None = None  # of the augmentation outside of the graph


def dali_threads(config: DataConfig, *, on_gpu: bool) -> int:
    """Return the number of DALI's CPU threads on this rank."""
    if config.threads:
        return config.threads
    return min(GPU_THREADS, own_cores()) if on_gpu else own_cores()


def largest_sides(index: Index, max_pixels: int, batch_size: int) -> tuple[int, int]:
    """Return the largest width and height of the images that may be read, for `Placement.decoder_hint`.

    nvJPEG gets width, height and batch size. Its manual does not say whether it reserves memory for each image of the batch,
    which for 256 images of 6000 x 6000 pixels would be 28 GB. Width and height are therefore limited, so that a batch of
    square images of that size takes RESERVED_BYTES. nvJPEG allocates once more, from DALI's pool, when it meets a larger image.
    """
    heights = np.asarray(index.heights, np.int64)
    widths = np.asarray(index.widths, np.int64)
    # Images beyond the limit are skipped and never decoded.
    usable = heights * widths <= max_pixels
    longest = math.isqrt(RESERVED_BYTES // (3 * batch_size))
    width = int(widths[usable].max(initial=1))
    height = int(heights[usable].max(initial=1))
    return min(width, longest), min(height, longest)


def size_at(sizes: Sequence[tuple[int, int]], step: int) -> int:
    """Return the size of the views in a step. sizes: (first step, size) in increasing order, beginning with step 0."""
    return next(size for first, size in reversed(sizes) if step >= first)


def plan_at(planner: Planner, sizes: Sequence[tuple[int, int]], step: int) -> Plan:
    """Return the plan of a step with the blur of the step's size of views. sizes: as for `ViewLoader`."""
    plan = planner.plan(step)
    if not sizes:
        return plan
    scale = size_at(sizes, step) / planner.recipe.size
    return plan._replace(blur_sigma=plan.blur_sigma * scale)


def train_requests(
    planner: Planner,
    sizes: Sequence[tuple[int, int]] = (),
    image_ids: NDArray[np.int64] | None = None,
    *,
    with_digest: bool = False,
) -> Callable[[int], Request]:
    """Return the function that gives the request of each training step, made from its plan.

    sizes: as for `ViewLoader`. A smaller view shows the same crop at a lower resolution, so its blur shrinks with it.
    image_ids: the images that the planner numbers from 0 on; None: all images of the index. with_digest: whether batches
    have the digest of their rows.
    """

    def request(step: int) -> Request:
        plan = plan_at(planner, sizes, step)
        ids = plan.image_ids if image_ids is None else image_ids[plan.image_ids]

        def digest(shown: NDArray, heights: NDArray, widths: NDArray) -> int:
            choices = row_choices(plan, planner.recipe, planner.images.first, shown, (heights, widths))
            return rows_digest(choices)

        return Request(
            ids,
            lambda heights, widths: view_arrays(plan, planner.recipe, heights, widths),
            digest if with_digest else None,
        )

    return request


def eval_requests(recipe: ViewsConfig, image_ids: NDArray[np.int64], batch_size: int) -> Callable[[int], Request]:
    """Return the function that gives the request of each evaluation step.

    Each image of `image_ids` gets one centre crop, in order. The last batch may be smaller.
    """

    def request(step: int) -> Request:
        ids = image_ids[step * batch_size : (step + 1) * batch_size]
        return Request(ids, lambda heights, widths: eval_arrays(recipe, heights, widths))

    return request


class ViewLoader:
    """Iterates over the batches of the steps first_step <= step < end_step, in order; one iteration at a time.

    Threads and pipeline live as long as the iteration. A reader's error is raised when the batch of its step is due.

    sizes: (first step, size of the views from that step on) in increasing order, beginning with step 0; empty: always the
        recipe's size. A new size needs a new pipeline, for whose first batch nothing has been read in advance.
    cache: keeps decoded images; None: every batch is decoded.
    quarantine: RUN_DIR/quarantine.jsonl. Its entries before first_step are known from the start, and new entries of `rank`
        are appended to it. None: nothing is known, and nothing is written.
    views_dtype: data type of normalised views, which `trainer.data.augment` makes after DALI's resize. None: DALI makes the
        whole views, uint8.
    """

    def __init__(
        self,
        index: Index,
        recipe: ViewsConfig,
        config: DataConfig,
        requests: Callable[[int], Request],
        *,
        batch_size: int,
        device: torch.device,
        first_step: int,
        end_step: int,
        sizes: Sequence[tuple[int, int]] = (),
        cache: DecodeCache | None = None,
        quarantine: Path | None = None,
        rank: int = 0,
        views_dtype: torch.dtype | None = None,
    ) -> None:
        self._sizes = tuple(sizes) or ((0, recipe.size),)
        self._cache = cache
        self.index = index
        self.recipe = recipe
        self.requests = requests
        self.first_step = first_step
        self.end_step = end_step
        self.batch_size = batch_size
        # A resumed run must replace the images that were replaced before.
        known = read_quarantine(quarantine, first_step) if quarantine else {}
        self.skipped = SkippedImages(index, config.max_skipped_share, known, quarantine, rank)
        self._reader = ImageReader(index, config.max_image_pixels)
        self._place = _placement(index, config, batch_size, device)
        self._num_readers = config.threads or own_cores()
        self._ahead = config.read_ahead_steps
        # The readers decode the images if there is a cache, or if torchcodec decodes on the CPU. DALI then gets pixels.
        self._by_torchcodec = config.decoder == "torchcodec"
        if self._by_torchcodec:
            import_torchcodec()  # refuse a missing package before the first step
        self._readers_decode = cache is not None or (self._by_torchcodec and device.type == "cpu")
        self._device = device
        self._views_dtype = views_dtype or torch.uint8
        self._augmentation: Any = None
        if views_dtype is not None:
            from trainer.data.augment import Augmentation  # loads triton, which machines without a GPU may lack

            self._augmentation = Augmentation(recipe, device)
        self._pipe: Any = None
        self._input_seconds = 0.0  # in which DALI waited for its inputs since the last batch
        self._decode_seconds = math.nan  # of one image
        self._sample_due = 0.0
        # DALI's outputs that the device may still be copying, each with the event that ends its copy.
        self._held: deque[tuple[Any, torch.cuda.Event]] = deque()

    def __iter__(self) -> Iterator[Batch]:
        # Reading waits for the disk, so there are many readers. One thread prepares the steps in order.
        self._readers = ThreadPoolExecutor(self._num_readers, "read")
        self._preparer = ThreadPoolExecutor(1, "prepare")
        self._source_error: Exception | None = None
        try:
            self._start(self.first_step)
            for step in range(self.first_step, self.end_step):
                began = time.perf_counter()
                self._input_seconds = 0.0
                # The views change their size in this step.
                if step == self._stop_step:
                    self._start(step)
                # DALI prepares the next batches while the caller uses this one.
                outputs, prepared = self._run(step)
                views = self._collect(outputs, len(prepared.image_ids), prepared.choices)
                wait_seconds = time.perf_counter() - began
                yield Batch(step, views, prepared.image_ids, wait_seconds, prepared.rows_digest, self._input_seconds)
        finally:
            # End the threads before the pipeline, and cancel what they have not begun.
            for pool in (self._preparer, self._readers):
                pool.shutdown(wait=True, cancel_futures=True)
            self._release_outputs(0)
            self._pipe = None

    def waiting_for(self) -> list[tuple[str, float]]:
        """Return (name, seconds) of each image that a reader is waiting for now, longest first. Any thread may call this."""
        return self._reader.waiting_for()

    def split_waits(self, for_inputs: float, for_views: float, seconds_per_step: float) -> Waits:
        """Divide waits since the last call among the stages. for_inputs: the sum of `Batch.input_seconds`; for_views: the rest.

        Nothing inside DALI's graph tells decoder and views apart. On a CPU the decoder's part follows from images that are
        decoded alone; on a GPU, whose JPEG engine decodes, both are in `views`. With a cache the readers decode."""
        threads = min(self._place.threads, own_cores())
        decode_seconds = self._decode_seconds * self.batch_size / threads
        # A loop that waits for DALI takes as long for a step as DALI for a batch.
        share = min(decode_seconds / seconds_per_step, 1.0) if seconds_per_step else math.nan
        if math.isnan(decode_seconds):
            share = math.nan
        spent = self._reader.stages.take()
        return split_waits(for_inputs, for_views, spent, decodes_in_readers=self._readers_decode, decode_share=share)

    def _start(self, step: int) -> None:
        """Build the pipeline for the steps from `step` on, up to the step in which the views change their size."""
        self._release_outputs(0)
        size = size_at(self._sizes, step)
        later_changes = [first for first, _ in self._sizes if first > step]
        self._stop_step = min([self.end_step, *later_changes])
        recipe = replace(self.recipe, size=size)
        # One buffer is enough: on a GPU the copy of a batch is queued on the stream that still uses the batch before it.
        shape = (recipe.num_views * self.batch_size, size, size, 3)  # view 0 of all images, then view 1, ...
        self._buffer = torch.empty(shape, dtype=self._views_dtype, device=self._device)
        self._next_step = step
        self._coming: deque[Future[Prepared]] = deque()  # steps being prepared
        self._fed: deque[Prepared] = deque()  # steps given to DALI whose outputs have not been taken
        ends_at_resize = self._augmentation is not None
        self._pipe = view_pipeline(
            recipe,
            self.batch_size,
            self._place,
            self._source,
            decoded_on="cpu" if self._readers_decode else "gpu" if self._by_torchcodec else None,
            ends_at_resize=ends_at_resize,
        )

    def _source(self) -> list[Any]:
        """Return the graph's inputs for the next batch. DALI calls this in the thread that runs the pipeline."""
        # Keep `read_ahead_steps` further steps in preparation.
        while len(self._coming) <= self._ahead and self._next_step < self._stop_step:
            self._coming.append(self._preparer.submit(self._prepare, self._next_step))
            self._next_step += 1
        if not self._coming:
            raise StopIteration
        began = time.perf_counter()
        try:
            prepared = self._coming.popleft().result()
            self._input_seconds += time.perf_counter() - began
        except Exception as error:
            # DALI raises this error again from run(); remember it to recognise it there.
            self._source_error = error
            raise
        self._fed.append(prepared)
        return prepared.arrays

    def _run(self, step: int) -> tuple[Any, Prepared]:
        """Return DALI's outputs for the step and the inputs they were made from.

        If DALI fails, the images that it refuses are converted or replaced, and a new pipeline runs the step again. If DALI
        can decode each image of the batch alone, Pillow decodes all of them. Raises RuntimeError if that does not help either.
        """
        while True:
            try:
                outputs = self._pipe.run()
                return outputs, self._fed.popleft()
            except RuntimeError as error:
                if error is self._source_error:  # a reader failed, not DALI
                    raise
                if not self._find_refused() and not self._refuse_batch(step, error):
                    raise RuntimeError(f"DALI failed in step {step}, though every image decodes: {error}") from error
                # Start again with a new pipeline, because a failed one cannot be used any more.
                for future in self._coming:
                    future.cancel()
                self._start(step)

    def _find_refused(self) -> bool:
        """Decode the images of all batches given to DALI one by one; return whether DALI refuses any of them.

        Refused images are converted or replaced from now on.
        """
        # DALI was given pixels that are decoded already.
        if self._readers_decode or self._by_torchcodec:
            return False
        given = []
        for prepared in self._fed:
            for image_id, data in zip(prepared.image_ids, prepared.arrays[0], strict=True):
                given.append((prepared.step, int(image_id), data))
        # Decoding takes time, so all reader threads help.
        refused = list(self._readers.map(lambda item: self._is_refused(*item), given))
        return any(refused)

    def _refuse_batch(self, step: int, error: RuntimeError) -> bool:
        """Let Pillow decode the images of the failed batch from now on.

        Returns False if that was done already, or if DALI was given pixels or nothing.
        """
        # The batch that failed is the oldest one that was given to DALI.
        ids: set[int] = set()
        if self._fed:
            ids.update(self._fed[0].image_ids.tolist())
        if self._readers_decode or self._by_torchcodec or ids <= self._reader.refused_by_dali:
            return False
        _log.warning(
            "DALI failed in step %d, though it decodes each of the %d images alone: Pillow decodes them now. DALI's error: %s",
            step,
            len(ids),
            printable(str(error)),
        )
        self._reader.refused_by_dali |= ids
        return True

    def _is_refused(self, step: int, image_id: int, data: NDArray[np.uint8]) -> bool:
        """Return whether DALI refuses an image. If so, let Pillow decode it from now on, or skip it."""
        on_gpu = self._place.device_id is not None
        if decode_by_dali(data.tobytes(), on_gpu=on_gpu) is not None:
            return False
        try:
            decode_rgb(data.tobytes())
            self._reader.refused_by_dali.add(image_id)
        except InputError as error:
            self.skipped.add(image_id, str(error), step)
        return True

    def _prepare(self, step: int) -> Prepared:
        """Read the images of a step, with many threads, and compute the graph's inputs."""
        request = self.requests(step)
        # The share of skipped images is taken over all images read.
        self.skipped.images_read += len(request.image_ids)
        with self._reader.stages.spend("images"):
            ids, images = self._read(step, request.image_ids)
        with self._reader.stages.spend("arrays"):
            prepared = self._joined(step, request, ids, images)
        self._sample_decoding(images)
        return prepared

    def _joined(self, step: int, request: Request, ids: NDArray[np.int64], images: list[Any]) -> Prepared:
        """Compute the graph's inputs for the images that are shown, given their bytes or pixels."""
        # The arrays depend on the sizes of the images that are really shown.
        heights = self.index.heights[ids]
        widths = self.index.widths[ids]
        arrays = request.arrays(heights, widths)
        choices = None
        if self._augmentation:
            arrays, choices = self._augmentation.split(arrays)
        # This thread works ahead, so that the digest takes no time of the training loop.
        digest = request.digest(ids, heights, widths) if request.digest else 0
        return Prepared(step, ids, [images, *arrays], digest, choices)

    def _read(self, step: int, wanted: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[Any]]:
        """Return the images shown instead of those wanted (N,), and their bytes or, if they are decoded here, their pixels."""
        # Each reader takes one image at a time; map keeps their order.
        usable = list(self._readers.map(partial(self._usable, step), wanted.tolist()))
        ids = np.array([image_id for image_id, _ in usable], dtype=np.int64)
        images = [data for _, data in usable]
        if self._readers_decode or not self._by_torchcodec:
            return ids, images
        try:
            return ids, decode_batch_on_gpu(images, self._device)
        except InputError:
            # Find the image that nothing can decode, and read again without it.
            for image_id, data in usable:
                try:
                    decode(data.tobytes())
                except InputError as error:
                    self.skipped.add(image_id, str(error), step)
            return self._read(step, wanted)

    def _sample_decoding(self, images: list[NDArray[np.uint8]]) -> None:
        """Now and then, measure how long the decoding of an image takes on a CPU."""
        began = time.perf_counter()
        if self._readers_decode or self._place.device_id is not None or began < self._sample_due:
            return
        decoded = 0
        for data in images[:_SAMPLED_IMAGES]:
            # An image that Pillow refuses tells nothing here: DALI decides whether the run can use it.
            with suppress(InputError):
                decode_rgb(data.tobytes())
                decoded += 1
        took = time.perf_counter() - began
        if decoded:
            self._decode_seconds = _DALI_BY_PILLOW * took / decoded
        self._sample_due = began + took / _SAMPLED_SHARE

    def _usable(self, step: int, image_id: int) -> tuple[int, NDArray[np.uint8]]:
        """Return (id, bytes or, if readers decode, pixels) of the image or of the next one that can be used.

        Images that cannot be used are skipped and recorded. Raises InputError if no image of the data set can be used.
        """
        for offset in range(len(self.index)):
            # The next image of the data set replaces a skipped one; the last is followed by the first.
            candidate = (image_id + offset) % len(self.index)
            if candidate not in self.skipped.ids:
                data, problem = self._load(candidate)
                if problem is None:
                    return candidate, data
                self.skipped.add(candidate, problem, step)
        raise InputError("no image of the set can be used; run `wmse check-data` on it")

    def _load(self, image_id: int) -> tuple[NDArray[np.uint8], str | None]:
        """Return (bytes or, if readers decode, pixels; None), or (an array to ignore, what is wrong with the image)."""
        if self._cache is not None:
            # Another rank of the node may have decoded the image.
            pixels = self._cache.get(image_id)
            if pixels is not None:
                return pixels, None
        # Not in the cache: read the file and, with a cache, decode it once for all ranks of the node.
        data, problem = self._reader.read(image_id)
        if problem is None and self._readers_decode:
            try:
                with self._reader.stages.spend("decode"):
                    pixels = decode_by_torchcodec(data) if self._by_torchcodec else decode(data)
                    return self._cache.put(image_id, pixels) if self._cache else pixels, None
            except InputError as error:
                problem = str(error)
        return np.frombuffer(data, np.uint8), problem

    def _collect(self, outputs: Any, count: int, choices: NDArray[np.float32] | None = None) -> torch.Tensor:
        """Join DALI's outputs, one for each view, to one view-major tensor: copy them, or augment them on the way."""
        buffer = self._buffer[: self.recipe.num_views * count]
        # from_dlpack shares memory with DALI, so the pixels are copied only once.
        shared = [torch.from_dlpack(output.as_tensor()) for output in outputs]
        if self._augmentation:
            self._augmentation(shared, choices, buffer)
        else:
            for view, pixels in enumerate(shared):
                buffer[view * count : (view + 1) * count].copy_(pixels)
        if self._device.type == "cuda":
            # Copy and kernels run asynchronously. DALI must not overwrite its output before this event.
            copied = torch.cuda.Event(blocking=True)
            copied.record(torch.cuda.current_stream(self._device))
            self._held.append((outputs, copied))
            self._release_outputs(HELD_BATCHES)
        return buffer.permute(0, 3, 1, 2)

    def _release_outputs(self, keep: int) -> None:
        """Release DALI's outputs except those of the last `keep` batches, as soon as the device has copied them.

        DALI overwrites released outputs on its own stream, which is not synchronised with torch's stream.
        """
        while len(self._held) > keep:
            _, copied = self._held[0]
            copied.synchronize()
            self._held.popleft()


class CentreCrops(NamedTuple):
    """One batch of centre crops for an evaluation."""

    pixels: torch.Tensor  # (n, 3, S, S) uint8, channels_last, on the device; the next batch overwrites it
    image_ids: NDArray[np.int64]  # (n,) images asked for
    is_right: NDArray[np.bool_]  # (n,) False where another image is shown, because this one cannot be used


def centre_crops(
    index: Index,
    image_ids: NDArray[np.int64],
    recipe: ViewsConfig,
    config: DataConfig,
    *,
    batch_size: int,
    device: torch.device,
) -> Iterator[CentreCrops]:
    """Yield the centre crops of the images, in order. The last batch may be smaller."""
    recipe = eval_recipe(recipe)
    loader = ViewLoader(
        index,
        recipe,
        config,
        eval_requests(recipe, image_ids, batch_size),
        batch_size=batch_size,
        device=device,
        first_step=0,
        end_step=math.ceil(len(image_ids) / batch_size),
    )
    for batch in loader:
        asked = image_ids[batch.step * batch_size :][:batch_size]
        yield CentreCrops(batch.views, asked, asked == batch.image_ids)


def _placement(index: Index, config: DataConfig, batch_size: int, device: torch.device) -> Placement:
    """Return the device and the resources of DALI on this rank."""
    on_gpu = device.type == "cuda"
    hint = config.decoder_hint
    # The settings give no hint: derive it from the sizes in the index.
    if on_gpu and not all(hint):
        hint = largest_sides(index, config.max_image_pixels, batch_size)
    return Placement(
        device_id=(device.index or 0) if on_gpu else None,
        threads=dali_threads(config, on_gpu=on_gpu),
        prefetch=config.prefetch_batches,
        hw_decoder_load=config.hw_decoder_load,
        decoder_hint=hint,
    )
