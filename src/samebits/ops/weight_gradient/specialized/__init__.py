"""Weight gradients by warps of several kinds, for sm_90."""
