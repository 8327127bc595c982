"""Files of Tiny ImageNet's own layout besides class folders: the list of classes, boxes, and the labels of the split val.

ROOT/wnids.txt                  the classes, one on each line
ROOT/train/WNID/images/*.JPEG   beside WNID_boxes.txt, which is no image
ROOT/val/images/*.JPEG          with the classes in ROOT/val/val_annotations.txt
ROOT/test/images/*.JPEG         without classes
"""

from pathlib import Path

from trainer.data.printable import printable
from trainer.errors import InputError

ANNOTATIONS = "val_annotations.txt"
IMAGES = "images"
_CLASS_LIST = "wnids.txt"


def is_tiny_imagenet(root: Path) -> bool:
    """Return whether ROOT holds Tiny ImageNet as downloaded."""
    return (root / _CLASS_LIST).is_file()


def read_classes(root: Path) -> list[str]:
    """Return the classes of ROOT/wnids.txt, sorted as class folders are; empty if there is no such file."""
    if not is_tiny_imagenet(root):
        return []
    return sorted(_read_text(root / _CLASS_LIST).split())


def has_annotations(folder: Path) -> bool:
    """Return whether a split has its labels in a file and its images in one folder."""
    return (folder / ANNOTATIONS).is_file() and (folder / IMAGES).is_dir()


def read_annotations(folder: Path) -> dict[str, str]:
    """Read the class of each image: NAME<tab>CLASS<tab>box on each line. Raises InputError naming file and line."""
    path = folder / ANNOTATIONS
    classes = {}
    for number, line in enumerate(_read_text(path).splitlines(), 1):
        # The box, in the other fields, is not needed.
        fields = line.split("\t")
        if len(fields) < 2 or not fields[0] or not fields[1]:
            raise InputError(f"{path}, line {number}: expected NAME<tab>CLASS, not {printable(line)[:80]!r}")
        classes[fields[0]] = fields[1]
    return classes


def _read_text(path: Path) -> str:
    # Names of files need not be UTF-8. Some editors put a byte order mark (sig) at the beginning.
    return path.read_text(encoding="utf-8-sig", errors="surrogateescape")


def is_boxes_file(class_name: str, name: str) -> bool:
    """Return whether a file of a class folder is the list of its boxes."""
    return name == f"{class_name}_boxes.txt"
