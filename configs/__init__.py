"""YAML only: one folder per config group, one file per preset. A package, so that an installed wheel finds it."""
