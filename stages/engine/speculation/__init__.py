"""Drafters: where the tokens to verify come from."""
