"""Adapters to other frameworks: they translate a configuration in, call, and translate out."""
