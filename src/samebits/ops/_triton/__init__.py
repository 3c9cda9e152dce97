"""Device functions that two or more operations share."""
