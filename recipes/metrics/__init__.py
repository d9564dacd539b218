"""What a step costs and gains: time, memory, FLOPs, and the ledger that writes them without stopping a device."""
