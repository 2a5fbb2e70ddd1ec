"""A small byte-level language model of Python source, shipped with its weights, to run the paged attention for real."""
