#!/bin/bash
# A SLURM cluster of two nodes on this machine: slurm_cluster.sh FOLDER COMMAND ... runs a command that may call sbatch, and
# takes all down with it. Each node has a network, processes, /tmp and /dev/shm of its own. Needs root and SLURM's daemons.
set -euo pipefail
if [[ ${INSIDE:-} != yes ]]; then
    INSIDE=yes exec unshare --net --mount --pid --uts --ipc --fork --kill-child --mount-proc "$0" "$@"
fi
folder=$1; shift
export SLURM_CONF="$folder/slurm.conf"
mkdir -p "$folder/state"
cat > "$SLURM_CONF" <<EOF
ClusterName=test
SlurmctldHost=control(10.88.0.1)
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
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
NodeName=n1 NodeAddr=10.88.0.11 CPUs=2 RealMemory=4000
NodeName=n2 NodeAddr=10.88.0.12 CPUs=2 RealMemory=4000
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE
EOF
printf '127.0.0.1 localhost\n10.88.0.1 control\n10.88.0.11 n1\n10.88.0.12 n2\n' > "$folder/hosts"
mount --bind "$folder/hosts" /etc/hosts
hostname control
ip link set lo up
ip link add bridge type bridge
ip addr add 10.88.0.1/24 dev bridge
ip link set bridge up
node() {  # name, address
    unshare --net --mount --pid --uts --ipc --fork --kill-child --mount-proc bash -c '
        hostname "$1"; mount -t tmpfs tmpfs /tmp; mount -t tmpfs tmpfs /dev/shm; ip link set lo up
        until ip link show eth >/dev/null 2>&1; do sleep 0.1; done
        ip addr add "$2/24" dev eth; ip link set eth up
        exec slurmd -D -N "$1"' node "$1" "$2" &
    local outer=$!
    until inner=$(pgrep -P "$outer"); do sleep 0.1; done
    ip link add "to-$1" type veth peer name eth netns "$inner"
    ip link set "to-$1" master bridge up
}
slurmctld -D &
node n1 10.88.0.11
node n2 10.88.0.12
for _ in {1..60}; do [[ $(sinfo -h -t idle -o %D) == 2 ]] && break; sleep 1; done
"$@"
