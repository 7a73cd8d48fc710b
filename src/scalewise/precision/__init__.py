"""Numeric precision."""

from scalewise.precision.config import Float8, FloatFormat, Precision

__all__ = ["Float8", "FloatFormat", "Precision"]
