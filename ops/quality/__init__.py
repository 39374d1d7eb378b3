"""How far the int8 engine is from the model as its file gives it, with each KV codec: `python -m ops.quality`."""
