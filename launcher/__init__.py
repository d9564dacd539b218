"""Compose and check a config, start processes, keep the run folder. Importing this package loads no torch."""
