"""Sweeps: many runs from one command, each a process tree of its own, on record in a folder. Read ``ledger`` first.

plan -> ledger -> backend (local, slurm) -> drive -> results, report
"""
