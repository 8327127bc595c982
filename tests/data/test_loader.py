"""The loader gives the same batches however it is started, replaces unusable images, and raises errors at their step."""

import io
import json
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as F
from pictures import damaged_png, encoded, image, make_folder, png_16_bit
from PIL import Image

from trainer.config.schema import DataConfig, ViewsConfig
from trainer.data.dali_graph import eval_recipe, view_arrays, view_pipeline
from trainer.data.index import Index, open_index
from trainer.data.loader import Batch, Request, ViewLoader, eval_requests, train_requests
from trainer.data.plan import Planner
from trainer.data.quarantine import drop_quarantine_after, read_quarantine
from trainer.distributed.ranks import ImageRange
from trainer.errors import InputError

RECIPE = ViewsConfig(num_views=2, size=16, eval_resize=16)
IMAGES, PER_STEP, STEPS = 20, 4, 12
CPU = torch.device("cpu")
WHOLE, PLAIN_SIZE = ImageRange(0, PER_STEP), (30, 40)


def picture_files(count: int = IMAGES) -> dict[str, bytes]:
    """Return `count` JPEG files of two classes, as path -> content."""
    height, width = PLAIN_SIZE
    return {
        f"train/c{i % 2}/{i:03d}.jpg": encoded("JPEG", image(seed=i, height=height, width=width)) for i in range(count)
    }


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Index:
    """Return an index of 20 images."""
    return open_index(make_folder(tmp_path_factory.mktemp("set"), picture_files()), "train")


def planner(index: Index, rows: ImageRange = WHOLE) -> Planner:
    return Planner(RECIPE, seed=0, num_images=len(index), images_per_step=PER_STEP, images=rows)


def loader(
    index: Index, *, rows=WHOLE, first=0, end=STEPS, threads=2, requests=None, kept=None, sizes=(), **data
) -> ViewLoader:
    """Return a training loader of the steps first..end-1. rows: images of a step; data: further settings in DataConfig."""
    return ViewLoader(
        index,
        RECIPE,
        DataConfig(threads=threads, **data),
        requests or train_requests(planner(index, rows)),
        batch_size=rows.count,
        device=CPU,
        first_step=first,
        end_step=end,
        sizes=sizes,
        quarantine=kept,
        rank=rows.first // rows.count,
    )


def keep(batches) -> list[Batch]:
    """Return all batches with copies of their views, because the loader overwrites its buffer."""
    return [batch._replace(views=batch.views.clone()) for batch in batches]


def same(a: list[Batch], b: list[Batch]) -> bool:
    return len(a) == len(b) and all(
        x.step == y.step and torch.equal(x.views, y.views) and np.array_equal(x.image_ids, y.image_ids)
        for x, y in zip(a, b, strict=True)
    )


@pytest.fixture(scope="module")
def batches(index) -> list[Batch]:
    """Return all batches of the default loader."""
    return keep(loader(index))


def test_batches_hold_the_images_of_the_plan_in_order(index, batches):
    assert [b.step for b in batches] == list(range(STEPS))
    for batch in batches:
        np.testing.assert_array_equal(batch.image_ids, planner(index).plan(batch.step).image_ids)
        assert batch.views.shape == (2 * PER_STEP, 3, 16, 16)
        assert batch.views.dtype == torch.uint8
        assert batch.views.is_contiguous(memory_format=torch.channels_last)
        assert batch.wait_seconds >= 0
    assert len(torch.unique(torch.cat([b.views for b in batches]), dim=0)) == STEPS * 2 * PER_STEP


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("ahead", [1, 4])
def test_threads_and_reading_ahead_change_no_batch(index, batches, threads, ahead):
    assert same(keep(loader(index, threads=threads, read_ahead_steps=ahead)), batches)


@pytest.mark.parametrize("depth", [1, 5])
def test_the_depth_of_the_dali_queue_changes_no_batch(index, batches, depth):
    assert same(keep(loader(index, prefetch_batches=depth)), batches)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_plans_are_made_ahead_by_the_preparing_thread(index, monkeypatch, depth):
    """Plan and arrays of a step are ready before its batch is requested, so that the request does not wait for them."""
    made: list[tuple[str, str, int]] = []

    def noted(name, function):
        def call(first, *rest):
            made.append((name, threading.current_thread().name, rest[0] if name == "plan" else first.step))
            return function(first, *rest)

        return call

    monkeypatch.setattr(Planner, "plan", noted("plan", Planner.plan))
    monkeypatch.setattr("trainer.data.loader.view_arrays", noted("arrays", view_arrays))
    iterator = iter(loader(index, read_ahead_steps=2, prefetch_batches=depth))
    for step in range(4):
        # besides the returned batch, DALI's queue holds depth - 1 batches, and two more are being read
        last = step + depth + 1
        next(iterator)
        end = time.monotonic() + 10
        while len(made) < 2 * (last + 1) and time.monotonic() < end:
            time.sleep(0.001)
        assert {what: max(s for w, _, s in made if w == what) for what in ("plan", "arrays")} == {
            "plan": last,
            "arrays": last,
        }
    iterator.close()
    assert {thread for _, thread, _ in made} == {"prepare_0"}


@pytest.mark.parametrize("first", [1, 5, 11])
def test_a_loader_that_starts_later_gives_the_same_batches(index, batches, first):
    assert same(keep(loader(index, first=first)), batches[first:])


def test_the_batches_of_two_ranks_joined_equal_those_of_one_process(index, batches):
    ranks = [keep(loader(index, rows=ImageRange(first, 2))) for first in (0, 2)]
    for joined, *parts in zip(batches, *ranks, strict=True):
        views = torch.cat([part.views.unflatten(0, (2, 2)) for part in parts], dim=1).flatten(0, 1)  # view-major
        assert torch.equal(views, joined.views)


def test_rows_are_view_major(index):
    """The views are whole images; view 0 is never flipped, and view 1 always."""
    recipe = replace(RECIPE, crop_area=(1.0, 1.0), crop_ratio=(4 / 3, 4 / 3))
    recipe = replace(recipe, color_probability=0.0, gray_probability=0.0, blur_probability=0.0)
    plan = planner(index).plan(0)._replace(flip=np.tile([False, True], (PER_STEP, 1)))
    fixed = type("Fixed", (), {"recipe": recipe, "plan": lambda self, step: plan})()
    one = ViewLoader(
        index, recipe, DataConfig(threads=1), train_requests(fixed), batch_size=4, device=CPU, first_step=0, end_step=1
    )
    (batch,) = keep(one)
    assert (batch.views[4:].int() - batch.views[:4].flip(3).int()).abs().max() <= 1
    assert (batch.views[4:].int() - batch.views[:4].int()).abs().float().mean() > 5


def test_a_batch_is_valid_until_the_next_one(index, batches):
    iterator = iter(loader(index))
    first = next(iterator)
    assert torch.equal(first.views, batches[0].views)
    next(iterator)
    assert torch.equal(first.views, batches[1].views), "the loader has a second buffer: update the docstring of Batch"


class Outputs:
    """DALI's outputs of one batch. They note when each view is copied and when the outputs are released."""

    def __init__(self, number: int, notes: list[str]) -> None:
        self.number, self.notes = number, notes

    def __iter__(self):
        return iter([self] * RECIPE.num_views)

    def as_tensor(self) -> torch.Tensor:
        self.notes.append(f"copy {self.number}")
        return torch.full((PER_STEP, 16, 16, 3), self.number, dtype=torch.uint8)

    def __del__(self) -> None:
        self.notes.append(f"drop {self.number}")


def loader_as_on_a_gpu(index: Index, monkeypatch: pytest.MonkeyPatch, notes: list[str]) -> ViewLoader:
    """Return a loader that works as on a GPU, with a buffer on the CPU and CUDA events that note each call."""

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            assert blocking  # a wait that spins would take a core

        def record(self, stream: str) -> None:
            assert stream == "torch's"
            self.number = notes[-1].removeprefix("copy ")
            notes.append(f"record {self.number}")

        def synchronize(self) -> None:
            notes.append(f"wait {self.number}")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "torch's")
    one = ViewLoader(
        index,
        RECIPE,
        DataConfig(threads=1),
        train_requests(planner(index)),
        batch_size=PER_STEP,
        device=torch.device("cuda"),
        first_step=0,
        end_step=STEPS,
    )
    one._buffer = torch.empty(RECIPE.num_views * PER_STEP, 16, 16, 3, dtype=torch.uint8)
    return one


def test_dali_outputs_on_a_gpu_are_released_after_their_copy(index, monkeypatch):
    """DALI overwrites released outputs in the order of another stream, so the copy must have ended before."""
    notes: list[str] = []
    one = loader_as_on_a_gpu(index, monkeypatch, notes)
    for number in range(5):
        assert (one._collect(Outputs(number, notes), PER_STEP) == number).all()
    one._release_outputs(0)
    for number in range(5):
        own = [note for note in notes if note.endswith(f" {number}")]
        assert own == [*[f"copy {number}"] * RECIPE.num_views, *(f"{w} {number}" for w in ("record", "wait", "drop"))]
    assert notes.index("wait 0") > notes.index("record 3"), "the host must not wait for the previous batch"


def test_on_a_gpu_dali_has_few_threads_and_memory_for_the_largest_image(tmp_path, monkeypatch):
    sizes = [(30, 40), (20, 90), (70, 10), (200, 300)]  # height, width
    files = {f"train/c/{i}.jpg": encoded("JPEG", image(height=h, width=w)) for i, (h, w) in enumerate(sizes)}
    index = open_index(make_folder(tmp_path, files), "train")
    monkeypatch.setattr("trainer.data.loader.own_cores", lambda: 26)

    def place(device: str, batch_size: int = 4, **data):
        return ViewLoader(
            index,
            RECIPE,
            DataConfig(**data),
            train_requests(planner(index)),
            batch_size=batch_size,
            device=torch.device(device),
            first_step=0,
            end_step=1,
        )._place

    assert place("cuda").decoder_hint == (300, 200)
    assert place("cuda", max_image_pixels=59_999).decoder_hint == (90, 70)
    assert place("cuda", decoder_hint=(500, 400)).decoder_hint == (500, 400)
    assert place("cpu").decoder_hint == (0, 0)
    monkeypatch.setattr("trainer.data.loader.RESERVED_BYTES", 4 * 3 * 250**2)
    assert place("cuda").decoder_hint == (250, 200)
    assert place("cuda", batch_size=64).decoder_hint == (62, 62)
    assert [place(device).threads for device in ("cuda", "cpu")] == [8, 26]
    assert [place(device, threads=12).threads for device in ("cuda", "cpu")] == [12, 12]
    monkeypatch.setattr("trainer.data.loader.own_cores", lambda: 4)
    assert place("cuda").threads == 4


def test_a_loader_can_be_iterated_again(index, batches):
    one = loader(index, end=3)
    assert same(keep(one), batches[:3])
    assert same(keep(one), batches[:3])


# --- evaluation ---


def evaluation(index: Index, ids: np.ndarray, size: int) -> ViewLoader:
    recipe = eval_recipe(RECIPE)
    return ViewLoader(
        index,
        recipe,
        DataConfig(threads=2),
        eval_requests(recipe, ids, size),
        batch_size=size,
        device=CPU,
        first_step=0,
        end_step=-(-len(ids) // size),
    )


@pytest.mark.parametrize("count", [1, 4, 18, 20])
def test_evaluation_shows_each_image_once_and_the_last_batch_may_be_short(index, count):
    ids = np.arange(len(index))[::-1][:count]
    shown = keep(evaluation(index, ids, 4))
    np.testing.assert_array_equal(np.concatenate([b.image_ids for b in shown]), ids)
    assert [len(b.views) for b in shown] == [4] * (count // 4) + [count % 4] * (count % 4 > 0)


ODD = {
    "grey jpeg": encoded("JPEG", image("L", 40, 30)),
    "cmyk jpeg": encoded("JPEG", image("CMYK", 40, 30), quality=95),
    "palette png": encoded("PNG", image("RGB", 40, 30).quantize(16)),
    "alpha png": encoded("PNG", image("RGBA", 40, 30)),
    "16-bit png": png_16_bit(),  # DALI alone decodes it to other pixels than Pillow
    "webp": encoded("WEBP", image("RGB", 40, 30)),
}


def test_images_of_any_kind_have_the_rgb_pixels_of_pillow(tmp_path):
    make_folder(tmp_path, {f"train/c/{name}.jpg": data for name, data in ODD.items()})
    index = open_index(tmp_path, "train")
    (batch,) = keep(evaluation(index, np.arange(len(index)), len(index)))
    for i, view in zip(batch.image_ids, batch.views, strict=True):
        picture = Image.open(io.BytesIO(ODD[index.name(i).removeprefix("c/").removesuffix(".jpg")])).convert("RGB")
        expected = F.center_crop(F.resize(picture, 16, F.InterpolationMode.BICUBIC), 16)
        assert (view.float() - F.pil_to_tensor(expected).float()).abs().mean() < 0.6, index.name(i)


# --- unusable images ---

GOOD = picture_files(1)["train/c0/000.jpg"]
BAD = {
    "html": (b"<html>404</html>", "not a readable image"),
    "empty": (b"", "empty file"),
    "cut": (GOOD[: len(GOOD) // 2], "Truncated"),
    "other size": (encoded("JPEG", image(height=31, width=40)), "31x40 pixels, but was 30x40 when"),
    "only decoding tells": (damaged_png(), "broken data stream"),
}


def entries(kept: Path) -> list[dict]:
    return [json.loads(line) for line in kept.read_text().splitlines()]


def index_of_spoilt_files(folder: Path, spoil: dict[int, bytes | None], count: int = IMAGES) -> Index:
    """Return an index whose images were usable when it was built, and then changed or vanished.

    spoil: image -> new content; None deletes the file. A PNG is there from the start: its header is sound.
    """
    files = picture_files(count)
    names = dict(enumerate(sorted(files)))
    header_only = {names[i]: data for i, data in spoil.items() if data and data.startswith(b"\x89PNG")}
    index = open_index(make_folder(folder, files | header_only), "train")
    for i, data in spoil.items():
        path = folder / names[i]
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data)
    return index


@pytest.mark.parametrize("kind", BAD)
def test_an_unusable_image_is_quarantined_once_and_replaced_by_the_next(tmp_path, kind):
    data, problem = BAD[kind]
    index, kept = index_of_spoilt_files(tmp_path, {7: data}), tmp_path / "quarantine.jsonl"
    got = keep(loader(index, kept=kept))
    (entry,) = entries(kept)
    first = next(batch.step for batch in got if 7 in planner(index).plan(batch.step).image_ids)
    assert (entry["step"], entry["id"], entry["image"], entry["rank"]) == (first, 7, index.name(7), 0)
    assert problem in entry["problem"]
    seen = 0
    for batch in got:
        wanted = planner(index).plan(batch.step).image_ids
        np.testing.assert_array_equal(batch.image_ids, np.where(wanted == 7, 8, wanted))
        assert len(batch.views) == 2 * PER_STEP
        seen += int((wanted == 7).sum())
    assert seen >= 2, "the plan must ask for the image more than once"
    for first in (3, 9):
        assert same(keep(loader(index, first=first, threads=1)), got[first:])


def test_an_unusable_replacement_is_replaced_too(tmp_path):
    """This holds at the end of the set too. Each image is quarantined once, whichever thread finds it."""
    spoil = {5: None, 6: b"", 7: damaged_png(), 8: b"x", 19: None, 0: None}
    index, kept = index_of_spoilt_files(tmp_path, spoil), tmp_path / "quarantine.jsonl"
    got = keep(loader(index, kept=kept, threads=3))
    assert sorted(entry["id"] for entry in entries(kept)) == sorted(spoil)
    assert "No such file" in next(entry["problem"] for entry in entries(kept) if entry["id"] == 5)
    replacement = np.arange(IMAGES)
    replacement[[5, 6, 7, 8]], replacement[[19, 0]] = 9, 1
    for batch in got:
        np.testing.assert_array_equal(batch.image_ids, replacement[planner(index).plan(batch.step).image_ids])
    assert same(keep(loader(index, first=6, threads=1)), got[6:])


def test_a_replacement_is_cropped_by_its_own_size(tmp_path):
    """A tall image that replaces a broad one gives the views that it gives when it is asked for itself."""
    sizes = [(30, 90), (80, 40), *[PLAIN_SIZE] * 2]
    files = {
        f"train/c0/{i}.jpg": encoded("JPEG", image(seed=i, height=height, width=width))
        for i, (height, width) in enumerate(sizes)
    }
    index = open_index(make_folder(tmp_path, files), "train")

    def views_of(image_id):
        plan = planner(index, ImageRange(0, 1)).plan(0)
        ids = np.array([image_id])
        request = Request(ids, lambda heights, widths: view_arrays(plan, RECIPE, heights, widths))
        return keep(loader(index, rows=ImageRange(0, 1), end=1, requests=lambda step: request))[0]

    asked_for = views_of(1)
    (tmp_path / "train/c0/0.jpg").unlink()
    replacement = views_of(0)
    assert replacement.image_ids.tolist() == [1]
    assert torch.equal(replacement.views, asked_for.views)


def fails_in_steps(index: Index, image_id: int, steps: range, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make an image unreadable while the given steps are prepared. Return the list of all reads."""
    now, asked, read, plan = [0], [], index.read, Planner.plan

    def plan_and_note(self: Planner, step: int):
        now[0] = step
        return plan(self, step)

    def read_or_fail(i: int) -> bytes:
        asked.append(i)
        if i == image_id and now[0] in steps:
            raise PermissionError(13, "Permission denied")
        return read(i)

    monkeypatch.setattr(Planner, "plan", plan_and_note)
    monkeypatch.setattr(index, "read", read_or_fail)
    return asked


def test_a_resumed_run_replaces_the_same_images_as_the_unbroken_one(index, tmp_path, monkeypatch):
    """The image stays replaced although the file is readable again. A run that resumes before the fault meets it again."""
    steps = [step for step in range(STEPS) if 7 in planner(index).plan(step).image_ids]
    assert len(steps) >= 3, "the plan must ask for the image before, at and after the fault"
    kept = tmp_path / "quarantine.jsonl"
    asked = fails_in_steps(index, 7, range(steps[0] + 1, steps[1] + 1), monkeypatch)
    unbroken = keep(loader(index, kept=kept))
    shown = [7 in batch.image_ids for batch in unbroken]
    assert [shown[step] for step in steps[:3]] == [True, False, False]
    for first in (steps[1] + 1, steps[2]):
        asked.clear()
        drop_quarantine_after(kept, first)
        resumed = loader(index, first=first, kept=kept, threads=1)
        assert len(resumed.skipped.ids) == 1
        assert same(keep(resumed), unbroken[first:])
        assert 7 not in asked
        assert len(entries(kept)) == 1
    drop_quarantine_after(kept, steps[1])
    assert entries(kept) == []
    assert same(keep(loader(index, first=steps[1], kept=kept)), unbroken[steps[1] :])
    assert [entry["step"] for entry in entries(kept)] == [steps[1]]


def test_resuming_on_another_number_of_ranks_skips_the_same_images(tmp_path):
    """Two ranks write what they find to one file; then one rank, or four, continue like an unbroken run on one rank."""
    spoil = dict.fromkeys((2, 9, 13, 14))
    index, kept = index_of_spoilt_files(tmp_path, spoil), tmp_path / "quarantine.jsonl"
    one = keep(loader(index))
    for rows in (ImageRange(0, 2), ImageRange(2, 2)):
        keep(loader(index, rows=rows, end=6, kept=kept))
    assert {entry["rank"] for entry in entries(kept)} == {0, 1}
    drop_quarantine_after(kept, 6)
    known = read_quarantine(kept, 6)
    for rows in [WHOLE, *(ImageRange(i, 1) for i in range(4))]:
        resumed = loader(index, rows=rows, first=6, kept=kept)
        assert resumed.skipped.ids == set(known)
        for batch, whole in zip(keep(resumed), one[6:], strict=True):
            np.testing.assert_array_equal(batch.image_ids, whole.image_ids[rows.first :][: rows.count])


def test_too_many_unusable_images_end_the_run(tmp_path):
    index, kept = index_of_spoilt_files(tmp_path, dict.fromkeys(range(0, 240, 2)), 240), tmp_path / "quarantine.jsonl"
    with pytest.raises(
        InputError, match=r"25 of the 240 images of the set cannot be used \(10.42%, more than .* 10.00%"
    ):
        keep(loader(index, kept=kept, end=1000, max_skipped_share=0.1))
    assert 25 <= len(entries(kept)) < 35  # other threads may still add those that they are reading
    few = index_of_spoilt_files(tmp_path / "few", dict.fromkeys(range(9), b""))
    assert len(keep(loader(few, max_skipped_share=0.0))) == STEPS  # nine unusable images never end a run


def test_the_images_read_are_counted(index):
    one = loader(index)
    keep(one)
    assert one.skipped.images_read == STEPS * PER_STEP


def test_the_loader_names_the_files_that_its_threads_wait_for(index, monkeypatch):
    go_on, read, seen = threading.Event(), index.read, []

    def hang(i: int) -> bytes:
        assert go_on.wait(10)
        return read(i)

    monkeypatch.setattr(index, "read", hang)
    one = loader(index, threads=2)

    def watch() -> None:
        while len(found := one.waiting_for()) < 2:
            time.sleep(0.001)
        seen.extend(found)
        go_on.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    keep(one)
    watcher.join()
    assert {name for name, _ in seen} <= {index.name(i) for i in planner(index).plan(0).image_ids}
    assert one.waiting_for() == []


def test_a_set_without_a_usable_image_is_refused(tmp_path):
    index = index_of_spoilt_files(tmp_path, dict.fromkeys(range(IMAGES)))
    with pytest.raises(InputError, match="no image of the set"):
        keep(loader(index, max_skipped_share=1.0))
    with pytest.raises(InputError, match=r"(1\d|20) of the 20 images of the set"):
        keep(loader(index))


@pytest.mark.slow
def test_no_bytes_of_an_image_crash_the_process(tmp_path):
    """Each of these crashes a process that decodes it. A child process loads them, so that a crash fails the test."""
    spoil = {2: b"\xff\xd8\xff\xd9", 4: b"GIF89a", 6: GOOD[:100], 9: damaged_png(), 11: b"", 13: b"<html>"}
    index_of_spoilt_files(tmp_path, spoil)
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_loader import *\n"
        f"one = loader(open_index(Path({str(tmp_path)!r}), 'train')); print(len(keep(one)), len(one.skipped.ids))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [str(STEPS), str(len(spoil))]


# --- errors and shutdown ---


def own_threads() -> list[str]:
    """Return the names of the loaders' threads that are alive."""
    return [t.name for t in threading.enumerate() if t.name.startswith(("read", "prepare"))]


def test_closing_a_loader_early_ends_its_threads(index):
    iterator = iter(loader(index, read_ahead_steps=4))
    next(iterator)
    assert own_threads()
    iterator.close()
    assert own_threads() == []


class BrokenError(RuntimeError):
    pass


@pytest.mark.parametrize("error", [BrokenError("disk on fire"), MemoryError(), InputError("no"), StopAsyncIteration()])
def test_an_error_while_reading_is_raised_at_its_step(index, batches, error):
    """The batches before it are returned. A RuntimeError is not mistaken for a failure of DALI, which has this type."""
    planned = train_requests(planner(index))

    def requests(step: int) -> Request:
        if step == 5:
            raise error
        return planned(step)

    got = []
    with pytest.raises(type(error)) as caught:
        got.extend(b._replace(views=b.views.clone()) for b in loader(index, requests=requests))
    assert caught.value is error
    assert own_threads() == []


def fails_in_step(step: int, times: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make DALI fail `times` times at the given step, after it has received all images. Return the steps that it ran."""
    ran: list[int] = []

    class Pipeline:
        def __init__(self, pipe, source) -> None:
            self.pipe, self.loader = pipe, source.__self__

        def run(self):
            outputs = self.pipe.run()
            ran.append(self.loader._fed[0].step)
            if ran[-1] == step and ran.count(step) <= times:
                raise RuntimeError("nvJPEG error 6\nStacktrace")
            return outputs

    def build(recipe, batch_size, place, source, **options):
        return Pipeline(view_pipeline(recipe, batch_size, place, source, **options), source)

    monkeypatch.setattr("trainer.data.loader.view_pipeline", build)
    return ran


def test_a_batch_on_which_dali_fails_once_is_decoded_by_pillow(index, batches, monkeypatch, caplog):
    """DALI decodes each image alone, but fails on the batch. The log says so; no image is skipped, and the run continues."""
    ran = fails_in_step(3, 1, monkeypatch)
    one = loader(index)
    assert same(keep(one), batches)
    assert ran == [0, 1, 2, 3, *range(3, STEPS)]
    assert one._reader.refused_by_dali == set(batches[3].image_ids.tolist())
    assert not one.skipped.ids
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "DALI failed in step 3" in record.getMessage()
    assert "nvJPEG error 6\\nStacktrace" in record.getMessage()


def test_a_batch_on_which_dali_fails_twice_ends_the_run(index, batches, monkeypatch):
    ran, got = fails_in_step(3, 2, monkeypatch), []
    with pytest.raises(RuntimeError, match="DALI failed in step 3, though every image decodes: nvJPEG error 6"):
        got.extend(b._replace(views=b.views.clone()) for b in loader(index))
    assert same(got, batches[:3])
    assert ran == [0, 1, 2, 3, 3]
    assert own_threads() == []


def test_a_failure_of_dali_without_an_unusable_image_ends_the_run(index):
    """The inputs are wrong for every image: the loader raises an error and does not retry forever."""
    broken = Request(np.arange(4), lambda heights, widths: [np.zeros((4, 2), np.float32)] * 12)
    with pytest.raises(RuntimeError, match="DALI failed in step 0, though every image decodes"):
        keep(loader(index, requests=lambda step: broken))
    assert own_threads() == []


SIZES = ((0, 8), (5, 16))  # first step, size


def batches_of_growing_views(index: Index, first: int = 0) -> list[Batch]:
    return keep(loader(index, first=first, requests=train_requests(planner(index), SIZES), sizes=SIZES))


def test_early_views_are_the_same_views_at_a_smaller_size(index, batches):
    found = batches_of_growing_views(index)
    assert [b.views.shape[-1] for b in found] == [8] * 5 + [16] * (STEPS - 5)
    assert same(found[5:], batches[5:])
    for small, large in zip(found[:5], batches[:5], strict=True):
        np.testing.assert_array_equal(small.image_ids, large.image_ids)
        halved = torch.nn.functional.avg_pool2d(large.views.float(), 2)
        assert (small.views.float() - halved).abs().mean() < 6  # another view of the same image differs by 40


@pytest.mark.parametrize("first", [3, 5, 7])
def test_a_resumed_loader_draws_views_of_the_size_of_its_step(index, first):
    assert same(batches_of_growing_views(index, first), batches_of_growing_views(index)[first:])


def test_the_blur_is_scaled_with_the_size_of_the_view(index):
    request = train_requests(planner(index), SIZES)
    for step, factor in ((0, 0.5), (5, 1.0)):
        drawn = planner(index).plan(step).blur_sigma[:, -1]
        assert drawn.any()
        *_, sigma, _ = request(step).arrays(*(np.full(PER_STEP, 40),) * 2)
        np.testing.assert_allclose(sigma, np.maximum(factor * drawn, 0.01), rtol=1e-6)
