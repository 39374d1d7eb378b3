"""The embedded Valkey: one per home."""
