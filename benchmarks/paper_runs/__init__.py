"""Small versions of the FSDP paper's experiments (arXiv 2304.11277) that run on CPU; ``paper_small.py`` starts them."""
