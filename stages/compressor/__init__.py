"""Third stage: turns raw chunks into sealed ones."""
