#!/usr/bin/env bash
# Starts the slurmd of one pretend node: node.sh FOLDER NODE. It and its jobs have a host name, a list of hosts and a /dev/shm of
# their own, as on a machine of its own; nothing outside FOLDER is changed.
set -euo pipefail
folder=$1
node=$2
export SLURM_CONF=$folder/slurm.conf
export PATH=$PATH:/usr/sbin:/sbin
mkdir -p "$folder/spool/$node" "$folder/shm/$node"
# shellcheck disable=SC2016 # expanded by the inner shell
exec unshare --uts --mount bash -euc '
    hostname "$2"
    mount --bind "$1/hosts" /etc/hosts
    mount --bind "$1/shm/$2" /dev/shm
    exec slurmd -N "$2"
' node "$folder" "$node"
