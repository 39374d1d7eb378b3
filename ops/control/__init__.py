"""How other commands talk to a running `sluice up`."""
