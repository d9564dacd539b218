"""Options of sbatch and srun: which are decided by keys of the config or by the launcher, and which are passed on."""

from __future__ import annotations

# Option of sbatch -> the key that decides it.
OURS = {
    "job-name": "run.name",
    "nodes": "cluster.num_nodes",
    "ntasks": "cluster.nproc_per_node",
    "ntasks-per-node": "cluster.nproc_per_node",
    "time": "cluster.time_limit",
    "partition": "cluster.partition",
    "account": "cluster.account",
    "qos": "cluster.qos",
    "constraint": "cluster.constraint",
    "reservation": "cluster.reservation",
    "nodelist": "cluster.nodelist",
    "exclude": "cluster.exclude",
    "gpus-per-node": "cluster.gpus_per_node",
    "gres": "cluster.gres",
    "cpus-per-task": "cluster.cpus_per_task",
    "mem": "cluster.memory",
    "exclusive": "cluster.exclusive",
    "dependency": "cluster.dependency",
    "mail-user": "cluster.mail_user",
    "mail-type": "cluster.mail_type",
    "comment": "cluster.comment",
    "nice": "cluster.nice",
    "signal": "cluster.signal_lead_s",
    "requeue": "cluster.requeue",
    "no-requeue": "cluster.requeue",
    "array": "sweep.max_parallel",
    "output": "run.dir",
    "error": "run.dir",
    "open-mode": "run.dir",
    "wait": "sweep.wait",
    "container": "cluster.container_image",
    "distribution": "",
    "export": "cluster.env",
    "wrap": "",
    "parsable": "",
    "test-only": "action=print_script",
}
# Others that sbatch takes in a script, as its manual lists them (SLURM 20.11 to 24.11).
# fmt: off
PASSED_ON = (
    "batch", "bb", "bbf", "begin", "chdir", "cluster-constraint", "clusters", "contiguous", "core-spec",
    "cores-per-socket", "cpu-freq", "cpus-per-gpu", "deadline", "delay-boot", "export-file", "extra",
    "extra-node-info", "get-user-env", "gid", "gpu-bind", "gpu-freq", "gpus", "gpus-per-socket", "gpus-per-task",
    "gres-flags", "hint", "hold", "ignore-pbs", "input", "kill-on-invalid-dep", "licenses", "mcs-label", "mem-bind",
    "mem-per-cpu", "mem-per-gpu", "mincpus", "network", "no-kill", "nodefile", "ntasks-per-core", "ntasks-per-gpu",
    "ntasks-per-socket", "overcommit", "oversubscribe", "power", "prefer", "priority", "profile", "propagate",
    "reboot", "resv-ports", "segment", "sockets-per-node", "spread-job", "stepmgr", "switches", "thread-spec",
    "threads-per-core", "time-min", "tmp", "tres-bind", "tres-per-task", "uid", "use-min-nodes", "wait-all-nodes",
    "wckey",
)
# fmt: on
OUR_SRUN = (
    "--kill-on-bad-exit",
    "--distribution",
    "--input",
    "--export",
    "--ntasks",
    "--nodes",
    "--ntasks-per-node",
    "-n",
    "-N",
)
