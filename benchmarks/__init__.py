"""Measurements as ratios: `python -m benchmarks`."""
