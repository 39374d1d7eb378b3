"""Runs it and looks into it: command line, supervisor, embedded server, models, benchmarks."""
