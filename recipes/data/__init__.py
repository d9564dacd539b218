"""Data sources: each module offers ``prepare(config, request) -> Splits``."""
