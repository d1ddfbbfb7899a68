"""Threshold and weights from data: what an ensemble should decode with, and whether it should be one at all."""

from adafuse_engine.calibration.weights import bits_per_byte, learn_weights

__all__ = ["bits_per_byte", "learn_weights"]
