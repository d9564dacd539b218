#!/bin/bash
#SBATCH --job-name=gpt_tiny
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --output=/home/me/sweeps/one/array_0/slurm-%a.log
#SBATCH --open-mode=append
#SBATCH --array=0-11%4
#SBATCH --time=1-12:00:00
#SBATCH --signal=USR2@80
#SBATCH --requeue
#SBATCH --cpus-per-task=4

run_dir=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" /home/me/sweeps/one/array_0/run_folders)
exec >>"$run_dir/logs/slurm.log" 2>&1
# SLURM may take a job long after sbatch was given up: of the jobs of a run folder only the latest runs.
if [ "$(cat "$run_dir/slurm/submission")" != 1 ]; then
  echo "this run folder was submitted again, or is gone: nothing is run" >&2
  exit 1
fi
export PYTHONPATH='/home/me/runs/one 100%/code'"${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export SRUN_CPUS_PER_TASK=4

# However this script ends, the end is recorded; a run that saved, or may try again, goes back to the queue.
finish() {
  code=$?
  trap - EXIT
  /venv/bin/python -P -m launcher.slurm.after --max-restarts 0 --max-requeues 100 --lead 80 --run-dir "$run_dir" --code "$code"
  exit $?
}
trap finish EXIT
trap : TERM USR1 USR2  # the ranks are told by SLURM too; this shell stays until they have ended
set -e

srun --kill-on-bad-exit=1 --distribution=block --input=none --export=ALL /venv/bin/python -P -m launcher.slurm.task --run-dir "$run_dir"
