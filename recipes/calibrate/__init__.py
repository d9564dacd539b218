"""``action=calibrate``: a machine measured, and its hardware profile written. Read ``recipe`` first.

rates (matrix products, memory, issuing) -> links (collectives) -> units (the model's own) -> profile (YAML)
"""
