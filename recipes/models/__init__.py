"""Models: each module offers ``build``, ``unit_classes`` and ``forward_flops`` for one kind."""
