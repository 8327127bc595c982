"""Trained encoders elsewhere: load them from many sources, compute features of any images, export them to other formats."""

from trainer.export.encoder import Encoder, Preprocess
from trainer.export.features import ImageFeatures, features
from trainer.export.plot import plot_map
from trainer.export.sources import load_encoder

__all__ = ["Encoder", "ImageFeatures", "Preprocess", "features", "load_encoder", "plot_map"]
