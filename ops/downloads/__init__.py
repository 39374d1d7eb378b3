"""Model files and data sets from package wheels."""
