"""The scaled product of many rows on sm_90: a candidate, not in use (docs/quantized.md)."""
