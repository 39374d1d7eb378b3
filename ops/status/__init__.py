"""What one sees when one looks into a stack: as data, as a page, and live."""
