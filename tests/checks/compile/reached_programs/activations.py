"""What is called through its module."""

SLOPE = 0.5


def scaled(x):
    return x * SLOPE
