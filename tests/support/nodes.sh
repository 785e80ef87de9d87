#!/bin/bash
# Two machines in this one: nodes.sh FOLDER COMMAND ... runs a command beside n1 (10.77.0.1) and n2 (10.77.0.2), and takes all
# down with it. Each has a network, processes, /tmp and /dev/shm of its own, and runs FOLDER/n1.sh or FOLDER/n2.sh; the command
# itself runs on a third one, `control` (10.77.0.254), to which both are wired (to-n1, to-n2). Needs root.
set -euo pipefail
if [[ ${INSIDE:-} != yes ]]; then
    INSIDE=yes exec unshare --net --mount --pid --uts --ipc --fork --kill-child --mount-proc "$0" "$@"
fi
folder=$1; shift
printf '127.0.0.1 localhost\n10.77.0.254 control\n10.77.0.1 n1\n10.77.0.2 n2\n' > "$folder/hosts"
mount --bind "$folder/hosts" /etc/hosts
: > "$folder/resolv.conf"  # no name server: an answer that does not come takes ten seconds
mount --bind "$folder/resolv.conf" /etc/resolv.conf
hostname control
ip link set lo up
ip link add bridge type bridge
ip addr add 10.77.0.254/24 dev bridge
ip link set bridge up
for number in 1 2; do
    unshare --net --mount --pid --uts --ipc --fork --kill-child --mount-proc bash -c '
        hostname "n$1"; mount -t tmpfs tmpfs /tmp; mount -t tmpfs tmpfs /dev/shm; ip link set lo up
        until ip link show eth >/dev/null 2>&1; do sleep 0.1; done
        ip addr add "10.77.0.$1/24" dev eth; ip link set eth up
        exec setsid bash "$2/n$1.sh"' node "$number" "$folder" &
    outer=$!
    until inner=$(pgrep -P "$outer"); do sleep 0.1; done
    ip link add "to-n$number" type veth peer name eth netns "$inner"
    ip link set "to-n$number" master bridge up
    echo "$inner" > "$folder/n$number.process"
done
"$@"
