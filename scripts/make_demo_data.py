"""Makes demo_data/, the committed subset of Fashion-MNIST: python scripts/make_demo_data.py DEST

10,000 training and 2,000 test images, equally many of each class, from the files of Debian's package dataset-fashion-mnist
(or torchvision's download). Tar gives each 0.5 kB picture 2 kB of headers and padding, so the shards are compressed: 5.5 MB
instead of 31. `open_index` uncompresses them once.
"""

import gzip
import sys
from pathlib import Path

from trainer.data.prepare import prepare

MAX_IMAGES = {"train": 10_000, "test": 2_000}
MAX_BYTES = 6_000_000
LICENSE = """\
The MIT License (MIT)

Copyright (c) 2017 Zalando SE, https://tech.zalando.com

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated documentation
files (the "Software"), to deal in the Software without restriction, including without limitation the rights to use, copy,
modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit persons to whom the
Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE,
ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""


def main(dest: Path) -> None:
    prepare("fashion-mnist", dest, max_images=MAX_IMAGES)
    for shard in sorted(dest.glob("*.tar")):
        with shard.with_name(f"{shard.name}.gz").open("wb") as file:
            file.write(gzip.compress(shard.read_bytes(), mtime=0))
        shard.unlink()
    (dest / "LICENSE-fashion-mnist.txt").write_text(LICENSE)
    total = sum(path.stat().st_size for path in dest.iterdir())
    print(f"{dest}: {total} bytes")
    if total > MAX_BYTES:
        sys.exit(f"more than {MAX_BYTES} bytes: take fewer images")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo_data"))
