"""What tests, checks and benchmarks share: asserts, input generators and named problems."""
