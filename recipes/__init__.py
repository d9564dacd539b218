"""Models, data, the training step and loop. Importing this package alone loads neither torch nor transformers."""
