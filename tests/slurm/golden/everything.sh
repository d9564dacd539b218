#!/bin/bash
#SBATCH --job-name=x
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=4
#SBATCH --output="/home/me/runs/one 100%%/logs/slurm.log"
#SBATCH --open-mode=append
#SBATCH --time=1-00:00:00
#SBATCH --signal=USR2@300
#SBATCH --requeue
#SBATCH --exclusive
#SBATCH --partition=a100,h100
#SBATCH --account=proj
#SBATCH --qos=high
#SBATCH --constraint=a100&ib
#SBATCH --reservation=res
#SBATCH --nodelist=gpu[01-08]
#SBATCH --exclude=gpu03
#SBATCH --gres=gpu:a100:4
#SBATCH --mem=64G
#SBATCH --dependency=afterok:12:13
#SBATCH --mail-user=me@example.org
#SBATCH --mail-type=END,FAIL
#SBATCH --comment="a \"b\" \\ c"
#SBATCH --nice=100
#SBATCH --licenses=matlab:1
#SBATCH --contiguous

run_dir='/home/me/runs/one 100%'
# SLURM may take a job long after sbatch was given up: of the jobs of a run folder only the latest runs.
if [ "$(cat "$run_dir/slurm/submission")" != 1 ]; then
  echo "this run folder was submitted again, or is gone: nothing is run" >&2
  exit 1
fi
export PYTHONPATH=/c"${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export NCCL_DEBUG=INFO
# WANDB_API_KEY comes from the environment of sbatch: secrets are not written down
export NAME='a b'

# However this script ends, the end is recorded; a run that saved, or may try again, goes back to the queue.
finish() {
  code=$?
  trap - EXIT
  /venv/bin/python -P -m launcher.slurm.after --max-restarts 2 --max-requeues 100 --lead 300 --run-dir "$run_dir" --code "$code"
  exit $?
}
trap finish EXIT
trap : TERM USR1 USR2  # the ranks are told by SLURM too; this shell stays until they have ended
set -e
module load cuda/12.8
module load nccl
ulimit -n 65536
export X="$HOME/x"

srun --kill-on-bad-exit=1 --distribution=block --input=none --export=ALL --cpu-bind=cores /opt/py/bin/python -P -m launcher.slurm.task --plugin '/p/my model.py' --run-dir "$run_dir"
