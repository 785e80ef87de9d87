#!/bin/bash
# A SLURM cluster of two nodes on this machine: slurm_cluster.sh FOLDER COMMAND ... runs a command that may call sbatch, and
# takes all down with it. Needs root and SLURM's daemons.
set -euo pipefail
folder=$1; shift
export SLURM_CONF="$folder/slurm.conf"
mkdir -p "$folder/state"
cat > "$SLURM_CONF" <<EOF
ClusterName=test
SlurmctldHost=control(10.77.0.254)
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/slurmd-%n
SlurmctldPidFile=$folder/control.pid
SlurmdPidFile=$folder/%n.pid
SlurmctldLogFile=$folder/control.log
SlurmdLogFile=$folder/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
NodeName=n1 NodeAddr=10.77.0.1 CPUs=2 RealMemory=4000
NodeName=n2 NodeAddr=10.77.0.2 CPUs=2 RealMemory=4000
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE
EOF
echo 'exec slurmd -D -N n1' > "$folder/n1.sh"
echo 'exec slurmd -D -N n2' > "$folder/n2.sh"
exec "$(dirname "$0")/nodes.sh" "$folder" bash -euc '
    slurmctld -D &
    for _ in {1..60}; do [[ $(sinfo -h -t idle -o %D) == 2 ]] && break; sleep 1; done
    "$@"' control "$@"
