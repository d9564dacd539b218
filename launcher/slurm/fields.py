"""What only SLURM reads of the ``cluster`` group."""

from __future__ import annotations

from dataclasses import dataclass

from recipes.schema.fields import described

LONGEST_LEAD_S = 86_400


@dataclass
class SlurmFields:
    """Keys of ``cluster`` that ``cluster=slurm`` turns into options of sbatch and srun; other clusters ignore them."""

    partition: str | None = described(None, "SLURM: partition (or several, with commas); null: the site's default")
    account: str | None = described(None, "SLURM: account to charge")
    qos: str | None = described(None, "SLURM: quality of service")
    constraint: str | None = described(None, "SLURM: features that nodes must have: a100&ib")
    reservation: str | None = described(None, "SLURM: reservation to run in")
    nodelist: str | None = described(None, "SLURM: nodes that must be among the job's: gpu[01-04]")
    exclude: str | None = described(None, "SLURM: nodes not to use")
    gpus_per_node: int | None = described(
        None, "SLURM: GPUs of one node; null: one for each rank with cluster.device=cuda", at_least=0, at_most=1024
    )
    gres: str | None = described(None, "SLURM: generic resources in SLURM's words instead of gpus_per_node: gpu:a100:8")
    cpus_per_task: int | None = described(None, "SLURM: cores of one rank", at_least=1, at_most=1024)
    memory: str | None = described(None, "SLURM: memory of one node: 64G; 0 is all of it")
    exclusive: bool = described(False, "SLURM: no other job on the nodes")
    dependency: str | None = described(None, "SLURM: jobs to wait for: afterok:1234")
    mail_user: str | None = described(None, "SLURM: address for mail")
    mail_type: str | None = described(None, "SLURM: when to send mail: END,FAIL")
    comment: str | None = described(None, "SLURM: a comment to show beside the job")
    nice: int | None = described(None, "SLURM: lower the priority by this much")
    modules: list[str] = described([], "SLURM: environment modules to load in the job")
    setup: list[str] = described([], "SLURM: shell lines to run in the job before the ranks start")
    python: str | None = described(None, "SLURM: the Python of the ranks; null: the one that submits")
    srun_args: list[str] = described([], "SLURM: more arguments of srun: --cpu-bind=cores")
    container_image: str | None = described(None, "SLURM: run the ranks inside this image")
    container_runtime: str = described(
        "pyxis", "SLURM: pyxis: srun --container-image; apptainer: apptainer exec", choices=("pyxis", "apptainer")
    )
    container_mounts: list[str] = described([], "SLURM: more folders that the container sees: /data or /data:/mnt")
    sbatch: dict[str, str] = described({}, "SLURM: any other option of sbatch: {licenses: 'matlab:1'}; '' for a flag")
    requeue: bool = described(True, "SLURM: run again after preemption, the time limit or the loss of a node")
    max_requeues: int = described(100, "SLURM: times a job goes back to the queue after saving", at_least=0)
    signal_lead_s: int | None = described(
        None,
        "SLURM: seconds before the time limit at which ranks are told to save; null: from what a save takes",
        at_least=1,
        at_most=LONGEST_LEAD_S,
    )
