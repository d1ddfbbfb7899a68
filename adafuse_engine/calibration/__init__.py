"""Threshold and weights from data: what an ensemble should decode with, and whether it should be one at all."""

from adafuse_engine.calibration.weights import learn_weights

__all__ = ["learn_weights"]
