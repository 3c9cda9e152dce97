"""Primitives of an expert layer: one folder each, with reference, kernels, operator and tuning."""
