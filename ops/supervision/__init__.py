"""Keeps processes running: starts, watches, restarts, scales and stops them."""
