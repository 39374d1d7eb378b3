"""From stamps to a trace file, and to a picture of it."""
