"""Checks: functions that return verdicts, for the command line, tests and reports alike."""
