"""GGUF model files: their bytes, which of them can be served, and where they lie. Starts without torch and numpy."""
