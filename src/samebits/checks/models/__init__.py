"""`samebits check models`: which experts implementations compute what the model says."""
