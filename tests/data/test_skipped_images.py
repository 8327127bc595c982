"""Skipped images are named once, quarantined, known to a resumed run, and too many of them end the run."""

import json
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from trainer.data.quarantine import SkippedImages, drop_quarantine_after, read_quarantine
from trainer.errors import InputError


@dataclass
class FewNames:
    """Stand-in for an index, with the methods that SkippedImages calls."""

    count: int = 1000
    root: Path = Path("/the set")

    def __len__(self) -> int:
        return self.count

    def name(self, i: int) -> str:
        return f"c/{i}.jpg"


def entry(step: int, i: int, rank: int = 0) -> dict:
    return {"step": step, "id": i, "image": f"c/{i}.jpg", "problem": "gone", "rank": rank}


def write(path: Path, *entries: dict, rest: str = "") -> Path:
    path.write_text("".join(json.dumps(e) + "\n" for e in entries) + rest)
    return path


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def quarantine(tmp_path: Path) -> Path:
    """Return the path of a quarantine file that does not exist yet."""
    return tmp_path / "quarantine.jsonl"


# --- the file ---


def test_entries_of_earlier_steps_are_read_again(quarantine: Path) -> None:
    SkippedImages(FewNames(), 0.1, quarantine=quarantine, rank=3).add(7, "cut", step=5)
    assert read(quarantine) == [{"step": 5, "id": 7, "image": "c/7.jpg", "problem": "cut", "rank": 3}]
    assert read_quarantine(quarantine, 6) == {7: "c/7.jpg"}
    assert read_quarantine(quarantine, 5) == {}, "a run that begins with step 5 meets the image again"


def test_without_a_quarantine_file_no_image_is_known_and_none_is_created(quarantine: Path) -> None:
    assert read_quarantine(quarantine, 9) == {}
    drop_quarantine_after(quarantine, 9)
    assert not quarantine.exists()


def test_entries_of_later_steps_and_duplicates_are_dropped(quarantine: Path) -> None:
    write(quarantine, entry(2, 7), entry(4, 8, rank=1), entry(3, 7, rank=1), entry(5, 9), entry(6, 8), entry(4, 1))
    assert read_quarantine(quarantine, 5) == {7: "c/7.jpg", 8: "c/8.jpg", 1: "c/1.jpg"}
    drop_quarantine_after(quarantine, 5)
    assert read(quarantine) == [entry(2, 7), entry(4, 8, rank=1), entry(4, 1)]


def test_a_quarantine_file_with_nothing_to_drop_is_not_rewritten(quarantine: Path) -> None:
    write(quarantine, entry(2, 7), entry(4, 8))
    before = quarantine.stat().st_ino
    drop_quarantine_after(quarantine, 5)
    assert quarantine.stat().st_ino == before


NO_ENTRIES = {
    "torn": '{"step": 2, "id": 7, "ima',
    "another program's": '{"image": "c/7.jpg", "problem": "gone"}',
    "no JSON": "\x00\x00",
    "a number": "7",
    "id no number": json.dumps({**entry(2, 7), "id": "7"}),
    "id below 0": json.dumps(entry(2, -7)),
    "step a truth": json.dumps({**entry(2, 7), "step": True}),
    "name a list": json.dumps({**entry(2, 7), "image": ["x"]}),
    "brackets without end": "[" * 100_000,
    "digits without end": '{"step": ' + "1" * 10_000,
}


@pytest.mark.parametrize("kind", NO_ENTRIES)
def test_a_line_that_is_not_an_entry_is_ignored(kind: str, quarantine: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(quarantine, entry(1, 3), rest=NO_ENTRIES[kind])
    assert read_quarantine(quarantine, 5) == {3: "c/3.jpg"}
    assert f"{quarantine}: ignored line 2, which is torn" in caplog.text
    drop_quarantine_after(quarantine, 5)
    assert read(quarantine) == [entry(1, 3)]


def test_ranks_that_write_at_once_do_not_mix_their_lines(quarantine: Path) -> None:
    many = [SkippedImages(FewNames(), 1.0, quarantine=quarantine, rank=rank) for rank in range(4)]

    def add_all(skipped: SkippedImages) -> None:
        for i in range(skipped.rank, 200, 4):
            skipped.add(i, "x" * 300, step=0)

    threads = [threading.Thread(target=add_all, args=(skipped,)) for skipped in many]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(read_quarantine(quarantine, 1)) == list(range(200))


def test_an_entry_is_appended_by_one_write(quarantine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This keeps the entries that processes on other nodes append at the same time."""
    written, flags = [], []
    write_once, open_once = os.write, os.open
    monkeypatch.setattr(os, "open", lambda path, flag, mode=0: (flags.append(flag), open_once(path, flag, mode))[1])
    monkeypatch.setattr(os, "write", lambda fd, data: (written.append(data), write_once(fd, data))[1])
    SkippedImages(FewNames(), 0.1, quarantine=quarantine).add(1, "cut", step=0)
    assert len(written) == 1
    assert written[0].endswith(b"\n")
    assert flags[0] & os.O_APPEND


def test_an_entry_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    skipped = SkippedImages(FewNames(), 0.1, quarantine=tmp_path / "no such folder" / "quarantine.jsonl")
    skipped.add(1, "cut", step=0)
    assert skipped.ids == {1}
    assert "a resumed run will have to find c/1.jpg again" in caplog.text


def test_names_of_any_bytes_are_written_on_one_line(quarantine: Path) -> None:
    """A file name may hold line ends, quotes, and bytes that are not UTF-8."""

    class Odd(FewNames):
        def name(self, i: int) -> str:
            return "c/a\udcff\n\"</script>'ü.jpg"

    SkippedImages(Odd(), 0.1, quarantine=quarantine).add(1, 'no\n"picture"\x1b[2J', step=0)
    assert quarantine.read_bytes().count(b"\n") == 1
    assert quarantine.read_bytes().isascii()
    assert read_quarantine(quarantine, 1) == {1: Odd().name(1)}


# --- images that a run knows ---


def test_a_resumed_run_does_not_name_known_images_again(quarantine: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(quarantine, entry(2, 7), entry(3, 8, rank=1))
    skipped = SkippedImages(FewNames(), 0.1, read_quarantine(quarantine, 5), quarantine)
    assert skipped.ids == {7, 8}
    skipped.add(7, "gone", step=6)
    assert caplog.text == ""
    skipped.add(9, "cut", step=6)
    assert skipped.ids == {7, 8, 9}
    assert len(read(quarantine)) == 3


def test_entries_that_do_not_match_the_set_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """After --allow_changes, other files may have these numbers."""
    skipped = SkippedImages(FewNames(count=8), 0.1, {7: "c/7.jpg", 6: "c/other.jpg", 8: "c/8.jpg"})
    assert skipped.ids == {7}
    assert "ignored 2 entries that do not match this set" in caplog.text


def test_each_skipped_image_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    skipped = SkippedImages(FewNames(), 0.1)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            skipped.add(7, "cut\nshort", step=0)
    (record,) = caplog.records
    assert record.getMessage() == "skipped c/7.jpg: cut\\nshort; the next image of the set replaces it"


# --- too many skipped images ---


def add(skipped: SkippedImages, count: int, first: int = 0) -> None:
    for i in range(first, first + count):
        skipped.add(i, "cut", step=0)


def test_too_large_a_share_of_the_set_ends_the_run_from_ten_images_on() -> None:
    skipped = SkippedImages(FewNames(500), 0.01)
    add(skipped, 9)
    with pytest.raises(InputError) as caught:
        add(skipped, 1, first=9)
    message = str(caught.value)
    assert message.startswith(
        "10 of the 500 images of the set cannot be used (2.00%, more than data.max_skipped_share 1.00%)"
    )
    assert "the last c/9.jpg: cut" in message
    assert "`wmse check-data /the set`" in message


@pytest.mark.parametrize(("images", "share", "most"), [(500, 0.1, 50), (10_000, 0.0, 9), (20, 0.0, 9), (20, 1.0, 20)])
def test_the_allowed_share_of_the_set_may_be_skipped(images: int, share: float, most: int) -> None:
    skipped = SkippedImages(FewNames(images), share)
    skipped.images_read = 1 << 40  # so that the limit on the share of the images read does not apply
    add(skipped, most)
    if most < images:
        with pytest.raises(InputError, match=f"{most + 1} of the {images} images of the set"):
            add(skipped, 1, first=most)


def test_too_large_a_share_of_the_images_read_ends_the_run_from_a_hundred_on() -> None:
    """This ends a run on a large set whose files vanish long before it has read all of them."""
    skipped = SkippedImages(FewNames(1_000_000), 0.01)
    skipped.images_read = 1000
    add(skipped, 99)
    with pytest.raises(InputError, match=r"^100 of the 1100 images read so far cannot be used \(9.09%"):
        add(skipped, 1, first=99)
    fine = SkippedImages(FewNames(1_000_000), 0.01)
    fine.images_read = 50_000
    add(fine, 505)
    with pytest.raises(InputError, match=r"^506 of the 50506 images read"):
        add(fine, 1, first=505)


def test_a_share_of_1_never_ends_a_run_that_has_a_usable_image() -> None:
    """Each skipped image costs the read of its replacement: never more images are skipped than read."""
    skipped = SkippedImages(FewNames(5_100), 1.0)
    skipped.images_read = 80
    add(skipped, 5_000)
    assert len(skipped.ids) == 5_000


def test_known_images_do_not_count_in_the_share_of_the_images_read() -> None:
    """150 of a million images are known, and one of the first few read is unusable: the run continues."""
    known = {i: f"c/{i}.jpg" for i in range(150)}
    skipped = SkippedImages(FewNames(1_000_000), 0.01, known)
    skipped.images_read = 16
    add(skipped, 1, first=150)
    assert len(skipped.ids) == 151


def test_a_run_that_knows_too_many_unusable_images_is_refused(quarantine: Path) -> None:
    with pytest.raises(InputError, match=r"20 of the 100 images of the set cannot be used.*all named in .*quarantine"):
        SkippedImages(FewNames(100), 0.1, {i: f"c/{i}.jpg" for i in range(20)}, quarantine)
