"""Row codecs: pure functions from one K or V row to its codes and its scale, and back."""
