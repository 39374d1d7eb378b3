"""Speed: of a whole stack under load (`python -m ops.bench`), and of the engine alone (`... engine`)."""
