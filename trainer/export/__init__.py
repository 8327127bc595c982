"""Trained encoders elsewhere: load them from many sources, compute features of any images, export them to other formats."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.export.classifier import Classifier, load_classifier
    from trainer.export.compute import ImageFeatures, features
    from trainer.export.encoder import Encoder, Preprocess
    from trainer.export.plot import plot_map
    from trainer.export.sources import load_encoder

__all__ = [
    "Classifier",
    "Encoder",
    "ImageFeatures",
    "Preprocess",
    "features",
    "load_classifier",
    "load_encoder",
    "plot_map",
]
_MODULES = {
    "Classifier": "classifier",
    "ImageFeatures": "compute",
    "features": "compute",
    "load_classifier": "classifier",
    "load_encoder": "sources",
    "plot_map": "plot",
}


def __getattr__(name: str) -> Any:
    """Import a name at its first use: the modules load torch, which `wmse export --help` does not need."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"trainer.export.{_MODULES.get(name, 'encoder')}"), name)
