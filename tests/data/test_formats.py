"""Each file is classified as direct, convert or bad, and DALI decodes the direct ones to the same pixels as Pillow."""

import io
import pickle
import struct
import subprocess
import sys
import timeit

import numpy as np
import pytest
from pictures import damaged_png, encoded, image, png_16_bit, png_chunks, shared
from PIL import Image

from trainer.data.image_probe import HEAD_BYTES, decode_rgb, inspect_head, inspect_image, to_direct
from trainer.errors import InputError

JPEG, PNG = encoded("JPEG"), encoded("PNG")


def turned_by_exif() -> Image.Exif:
    exif = Image.Exif()
    exif[0x112] = 6
    return exif


def with_palette() -> Image.Image:
    return image().quantize(13)


DIRECT = {
    "baseline": JPEG,
    "progressive": encoded("JPEG", progressive=True),
    "4:4:4": encoded("JPEG", subsampling=0),
    "4:1:1": encoded("JPEG", subsampling="4:1:1"),
    "restart": encoded("JPEG", restart_marker_blocks=2),
    "grey": encoded("JPEG", image("L")),
    "rgb jpeg": encoded("JPEG", keep_rgb=True),
    "turned": encoded("JPEG", exif=turned_by_exif()),
    "fill bytes": JPEG[:2] + b"\xff\xff" + JPEG[2:],
    "junk after the end": JPEG + b"junk" * 50,
    "1x1": encoded("JPEG", image(height=1, width=1)),
    "extreme": encoded("JPEG", image(height=3, width=2000)),
    "png": PNG,
    "png grey": encoded("PNG", image("L")),
    "png 1 bit": encoded("PNG", image("1")),
    "png palette": encoded("PNG", with_palette()),
    "png palette, transparent": encoded("PNG", with_palette(), transparency=3),
    "png transparent colour": encoded("PNG", transparency=image().getpixel((0, 0))),
    "png alpha": encoded("PNG", image("RGBA")),
    "png grey alpha": encoded("PNG", image("LA")),
    "png uncompressed": encoded("PNG", compress_level=0),
}
CONVERT = {
    "cmyk": encoded("JPEG", image("CMYK")),
    "16 bit": png_16_bit(),
    "16 bit grey": encoded("PNG", Image.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30) * 100)),
    "webp": encoded("WEBP"),
    "bmp": encoded("BMP"),
    "tiff": encoded("TIFF"),
    "gif": encoded("GIF", save_all=True, append_images=[image(seed=1)]),
    "animated png": encoded("PNG", save_all=True, append_images=[image(seed=1)]),
    "junk between segments": JPEG[:20] + b"\xe5\0\2" + JPEG[20:],
}
BAD = {
    "empty": b"",
    "text": b"<html><body>404 Not Found</body></html>",
    "cut header": JPEG[:100],
    "cut": JPEG[: len(JPEG) // 2],
    "cut png": PNG[: len(PNG) // 2],
    "only a start marker": b"\xff\xd8",
    "jpeg without pixels": b"\xff\xd8\xff\xd9",
    "png signature": PNG[:8],
    "bomb": png_chunks(
        (b"IHDR", struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)), (b"IDAT", b"x"), (b"IEND", b"")
    ),
    "no pixels": png_chunks((b"IHDR", struct.pack(">IIBBBBB", 0, 5, 8, 2, 0, 0, 0)), (b"IDAT", b"x"), (b"IEND", b"")),
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n",
}


def as_pillow(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize("name", DIRECT)
def test_a_direct_file_is_recognised_with_its_size(name: str) -> None:
    info = inspect_image(DIRECT[name])
    assert info.kind == "direct"
    assert (info.height, info.width) == as_pillow(DIRECT[name]).shape[:2]


@pytest.mark.parametrize("name", CONVERT)
def test_conversion_keeps_the_pixels_that_pillow_decodes(name: str) -> None:
    info = inspect_image(CONVERT[name])
    assert info.kind == "convert"
    converted = to_direct(CONVERT[name])
    assert inspect_image(converted)[:2] == ("direct", "PNG")
    np.testing.assert_array_equal(as_pillow(converted), as_pillow(CONVERT[name]))
    assert (info.height, info.width) == as_pillow(converted).shape[:2]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_has_a_problem_of_one_line(name: str) -> None:
    info = inspect_image(BAD[name])
    assert info.kind == "bad"
    assert info.problem
    assert "\n" not in info.problem
    with pytest.raises(InputError, match=r".+"):
        to_direct(BAD[name])


def test_the_first_bytes_classify_only_direct_files() -> None:
    photograph = encoded("JPEG", image(height=300, width=400), quality=95)
    assert len(photograph) > HEAD_BYTES
    assert inspect_head(photograph[:HEAD_BYTES]) == inspect_image(photograph)
    assert inspect_head(photograph[:100]) is None
    assert inspect_head(CONVERT["cmyk"]) is None
    assert inspect_head(BAD["text"]) is None


def test_a_truncated_file_is_never_direct() -> None:
    """The last 25 bytes of a PNG hold no pixels: such a file may be converted, but DALI never gets it as it is."""
    for data in (JPEG, DIRECT["progressive"], PNG):
        assert {inspect_image(data[:length]).kind for length in range(len(data) - 25)} == {"bad"}
        assert "direct" not in {inspect_image(data[:length]).kind for length in range(len(data))}


def test_a_png_with_a_wrong_checksum_is_converted() -> None:
    """Pillow ignores the checksum of the pixel data, while DALI refuses the file."""
    position = PNG.index(b"IDAT") + 4 + int.from_bytes(PNG[PNG.index(b"IDAT") - 4 : PNG.index(b"IDAT")], "big")
    wrong_checksum = PNG[:position] + b"\0\0\0\0" + PNG[position + 4 :]
    assert inspect_image(wrong_checksum).kind == "convert"
    np.testing.assert_array_equal(as_pillow(to_direct(wrong_checksum)), as_pillow(PNG))


def test_a_jpeg_with_a_stray_marker_is_not_direct() -> None:
    position = JPEG.index(b"\xff\xda") + 100
    stray = JPEG[:position] + b"\xff\xae\0\2" + JPEG[position:]
    assert inspect_image(stray).kind != "direct"


def test_an_end_marker_behind_a_cut_does_not_hide_it() -> None:
    assert inspect_image(DIRECT["progressive"][:-200] + b"\xff\xd8\xff\xaejunk\xff\xd9").kind == "bad"


def test_damaged_pixel_data_are_found_by_decoding() -> None:
    damaged = damaged_png()
    assert inspect_image(damaged).kind == "direct"
    with pytest.raises(InputError, match="Error"):
        decode_rgb(damaged)
    decode_rgb(PNG)


def test_inspecting_a_file_takes_microseconds() -> None:
    assert min(timeit.repeat(lambda: inspect_image(JPEG), number=200, repeat=5)) / 200 < 100e-6  # 3 us measured


ODD = {
    "01_truncated.jpg": "bad",
    "02_truncated.png": "bad",
    "03_tv_corrupt.jpg": "bad",
    "06_text_named.jpg": "bad",
    "08_broken_stream.png": "bad",
    "09_cmyk_adobe.jpg": "convert",
    "11_gray.jpg": "direct",
    "13_bad_exif.jpg": "direct",
    "15_png_named.JPEG": "direct",
    "17_webp_named.jpg": "convert",
    "18_animated.gif": "convert",
    "19_rgb16.png": "convert",
    "22_rgba.png": "direct",
    "24_12bit.jpg": "bad",
    "26_arithmetic.jpg": "convert",
    "29_bomb.gif": "bad",
    "31_apng_bad.png": "bad",
    "33_1bit.png": "direct",
    "39_zero_byte.JPEG": "bad",
    "43_imagenet_trailing_junk.JPEG": "direct",
    "45_1x1.jpg": "direct",
    "46_4000x3.jpg": "direct",
    "48_95MP.jpg": "direct",
}


def test_odd_files_are_classified() -> None:
    found = {path.name: inspect_image(path.read_bytes()).kind for path in shared("odd").iterdir() if path.name in ODD}
    assert found == ODD


# This decodes as the graph of a run does, but in another process: DALI can crash on invalid bytes.
DALI_PROGRAM = """
import pickle, sys
import numpy as np
from nvidia.dali import fn, pipeline_def
from trainer.data.dali_graph import Placement, decode

@pipeline_def(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
def graph():
    encoded = fn.external_source(source=lambda: [np.frombuffer(data, np.uint8)], batch=True)
    return decode(encoded, Placement(None, 1, 1))

pipe, decoded, errors = None, [], []
for data in pickle.load(sys.stdin.buffer):
    pipe = pipe or graph()
    try:
        decoded.append(np.array(pipe.run()[0].at(0)))
    except RuntimeError as error:
        pipe = None
        decoded.append(None)
        errors.append(str(error))
pickle.dump((decoded, errors), sys.stdout.buffer)
"""


def decode_with_dali(files: list[bytes]) -> tuple[list[np.ndarray | None], list[str]]:
    """Return the RGB pixels of each file, None for those that DALI refuses, and DALI's messages about these."""
    done = subprocess.run(
        [sys.executable, "-c", DALI_PROGRAM], input=pickle.dumps(files), capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return pickle.loads(done.stdout)  # noqa: S301 - written by the program above


def test_invalid_bytes_never_reach_the_decoder() -> None:
    """The graph refuses them when it reads their shape, even without the check of the structure. A new graph works."""
    pytest.importorskip("nvidia.dali")
    good = encoded("JPEG", image(height=400, width=300))
    bad = [b"<html>404</html>", good[:200], encoded("PNG")[:20], b"GIF89a", b"\xff\xd8\xff\xd9", b""]
    decoded, errors = decode_with_dali([good, *bad, good])
    assert [pixels is None for pixels in decoded] == [False, *[True] * len(bad), False]
    np.testing.assert_array_equal(decoded[-1], as_pillow(good))
    for error in errors:
        assert "peek_image_shape" in error


def test_dali_decodes_direct_and_converted_files_like_pillow() -> None:
    pytest.importorskip("nvidia.dali")
    names = [*DIRECT, *CONVERT]
    files = [*DIRECT.values(), *(to_direct(data) for data in CONVERT.values())]
    for name, data, decoded in zip(names, files, decode_with_dali(files)[0], strict=True):
        assert decoded is not None, name
        np.testing.assert_array_equal(decoded, as_pillow(data), err_msg=name)


def test_dali_survives_damaged_files_that_are_classified_as_direct() -> None:
    """DALI refuses those that Pillow refuses, and decodes the others to the same pixels as Pillow."""
    pytest.importorskip("nvidia.dali")
    rng = np.random.default_rng(0)
    files = []
    while len(files) < 150:
        data = bytearray(list(DIRECT.values())[rng.integers(len(DIRECT))])
        for position in rng.integers(len(data), size=rng.integers(1, 6)):
            data[position] = rng.integers(256)
        info = inspect_image(bytes(data))
        if info.kind == "direct" and info.height * info.width < 1_000_000:
            files.append(bytes(data))
    decoded, _ = decode_with_dali(files)
    assert any(pixels is not None for pixels in decoded)
    for data, pixels in zip(files, decoded, strict=True):
        if pixels is None:
            with pytest.raises(InputError):
                decode_rgb(data)
        else:
            np.testing.assert_array_equal(pixels, as_pillow(data))
