"""Know before you launch: the run's own model, units and step on tensors without memory, replayed on a profile."""
