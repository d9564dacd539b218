"""SLURM: the job's script as text, submitting it, a rank's life under srun, how jobs end, asking after them."""
