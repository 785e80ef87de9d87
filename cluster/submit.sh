#!/bin/bash
# Submit one training to a running Ray cluster; all arguments are flags of ray_yolo.train:
#
#   cluster/submit.sh --data /storage/data/coco.yaml --num-workers 8 --storage-path /storage
#
# The cluster is RAY_API_SERVER_ADDRESS, else this machine's end of a tunnel (`ray dashboard cluster/aws.yaml`).
# Prints the line it runs. Exits 0 when the training succeeded, 1 when it failed.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export RAY_AUTH_MODE=token  # `ray job` does not turn it on by itself, even where there is a token
export RAY_API_SERVER_ADDRESS="${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}"

command=(ray job submit --working-dir . -- python -m ray_yolo.train "$@")
printf 'RAY_AUTH_MODE=token RAY_API_SERVER_ADDRESS=%q' "$RAY_API_SERVER_ADDRESS"
printf ' %q' "${command[@]}"
printf '\n'
exec "${command[@]}"
