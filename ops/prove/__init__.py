"""One batch through many stacks, compared to the bit: `python -m ops.prove`."""
