"""One folder per process, plus the engine and the text code they share."""
