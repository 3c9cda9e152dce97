"""Second projections by warps of two kinds: sm_90 only, through Gluon."""
