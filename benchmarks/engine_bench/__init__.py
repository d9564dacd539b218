"""What the engine benchmarks share: cases, models, the engines under test, processes that run them, and reports."""
