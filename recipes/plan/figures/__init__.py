"""The evaluation figures of the FSDP paper (arXiv 2304.11277), computed from configs and laid beside what it published.

points (what is published, and the words of each run) -> compute (one plan a run) -> compare and effects -> text, page
"""
