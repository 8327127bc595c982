#!/usr/bin/env bash
# Stops the cluster that start.sh started in FOLDER: its jobs, its daemons, and nothing else.
set -uo pipefail
folder=${1:?usage: stop.sh FOLDER}
export SLURM_CONF=$folder/slurm.conf
export PATH=$PATH:/usr/sbin:/sbin

# Process ids: those that have VARIABLE (as NAME=VALUE, a pattern) and this cluster's configuration in their environment.
having() { # VARIABLE
    grep --files-with-matches --null-data --line-regexp --fixed-strings "SLURM_CONF=$SLURM_CONF" /proc/[0-9]*/environ 2>/dev/null |
        xargs --no-run-if-empty grep --files-with-matches --null-data --line-regexp "$1" 2>/dev/null | cut -d / -f 3
}

daemon() { # NAME: its process ids
    local process
    for process in $(having "SLURM_CONF=.*"); do
        [ "$(cat "/proc/$process/comm" 2>/dev/null)" = "$1" ] && echo "$process"
    done
}

stop() { # NAME: TERM, and KILL for what is still there after 10 s
    local processes
    processes=$(daemon "$1")
    [ -n "$processes" ] || return 0
    kill $processes 2>/dev/null
    for _ in $(seq 100); do
        [ -n "$(daemon "$1")" ] || return 0
        sleep 0.1
    done
    kill -KILL $(daemon "$1") 2>/dev/null
}

if [ -n "$(daemon slurmctld)" ]; then
    timeout 10 squeue --noheader --format=%A | sort -u | xargs --no-run-if-empty timeout 10 scancel
    for _ in $(seq 100); do
        [ -n "$(timeout 5 squeue --noheader)" ] || break
        sleep 0.1
    done
fi
stop slurmd
stop slurmctld
stop slurmstepd
# Tasks that outlived their job. Not what runs this script, where that is a job of this cluster itself.
[ -n "${SLURM_JOB_ID:-}" ] || kill -KILL $(having "SLURM_JOB_ID=.*") 2>/dev/null
stop slurmdbd
stop mariadbd
stop munged
