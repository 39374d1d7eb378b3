"""The commands of `sluice`, one a file; cli.py puts them together."""
