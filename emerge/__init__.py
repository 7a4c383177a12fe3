"""Emerge proves that two computation graphs compute the same thing, or shows where they part."""

__version__ = "0.1.0"
