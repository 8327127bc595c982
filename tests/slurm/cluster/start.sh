#!/usr/bin/env bash
# Starts a real SLURM cluster on this machine, for tests to throw away: munged, mariadbd and slurmdbd (for sacct), slurmctld, and
# a slurmd for each of eight pretend nodes n1 to n8. All its files are in FOLDER; stop.sh ends it. Needs root.
#
#   start.sh FOLDER && export SLURM_CONF=FOLDER/slurm.conf
set -euo pipefail
folder=${1:?usage: start.sh FOLDER}
scripts=$(cd "$(dirname "$0")" && pwd)
nodes="n1 n2 n3 n4 n5 n6 n7 n8"
port=$((10000 + $$ % 1000 * 20)) # below the ports that the system hands out; two clusters at once get different ones
export SLURM_CONF=$folder/slurm.conf
export PATH=$PATH:/usr/sbin:/sbin

fail() {
    echo "the SLURM cluster did not start: $*" >&2
    for log in "$folder"/log/*.log; do
        echo "--- $log" >&2
        tail -n 5 "$log" >&2
    done
    exit 1
}

wait_for() { # SECONDS COMMAND...
    local end=$((SECONDS + $1))
    shift
    until timeout 5 "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $end ] || return 1
        sleep 0.1
    done
}

daemon() { # a daemon that kept our standard output would keep whoever reads it waiting
    "$@" </dev/null >>"$folder/log/start.log" 2>&1
}

mkdir -p "$folder"/{log,run,state,spool,database,dev}
chmod 755 "$folder"

# --- configuration ---

cat >"$folder/slurm.conf" <<CONF
ClusterName=tests
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
MailProg=/bin/true
AuthType=auth/munge
# cred_expire is also how long a requeued job waits before it may start again: 120 s where it is not set
AuthInfo=socket=$folder/run/munge.sock,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/run/slurmctld.pid
SlurmdPidFile=$folder/run/slurmd-%n.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd-%n.log
# Without cgroups; and the nodes are what this file says, not what the machine has.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_continue
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PriorityType=priority/basic
# A preempted job gets TERM and, as on most clusters, not the signal that it asked for by --signal. A job is requeued only if it
# asked for that.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=0
EnforcePartLimits=ANY
KillWait=3
MinJobAge=1200
CompleteWait=0
# A node that does not answer for this long is down, and its jobs are requeued.
SlurmdTimeout=30
SlurmctldTimeout=30
UnkillableStepTimeout=30
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$((port + 1))
AccountingStoragePass=$folder/run/munge.sock
GresTypes=gpu
PartitionName=low Nodes=ALL Default=YES DefaultTime=10 PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=ALL DefaultTime=10 PriorityTier=10 PreemptMode=OFF
CONF

(umask 077 && cat >"$folder/slurmdbd.conf") <<CONF
AuthType=auth/munge
AuthInfo=socket=$folder/run/munge.sock
DbdHost=$(hostname -s)
DbdAddr=127.0.0.1
DbdPort=$((port + 1))
SlurmUser=root
LogFile=$folder/log/slurmdbd.log
PidFile=$folder/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$((port + 2))
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
CONF

cat >"$folder/database.sql" <<SQL
CREATE DATABASE slurm_acct_db;
CREATE USER 'slurm'@'127.0.0.1' IDENTIFIED BY 'slurm';
GRANT ALL ON slurm_acct_db.* TO 'slurm'@'127.0.0.1';
SQL

# slurmd takes only character devices for GPUs; links to /dev/null pass.
echo "AutoDetect=off" >"$folder/gres.conf"
cp /etc/hosts "$folder/hosts"
slurmd_port=$((port + 3))
for node in $nodes; do
    ln -s /dev/null "$folder/dev/$node-gpu0"
    ln -s /dev/null "$folder/dev/$node-gpu1"
    echo "NodeName=$node Name=gpu File=$folder/dev/$node-gpu[0-1]" >>"$folder/gres.conf"
    echo "NodeName=$node NodeAddr=127.0.0.1 Port=$slurmd_port CPUs=4 CoresPerSocket=4 RealMemory=8000 Gres=gpu:2" >>"$SLURM_CONF"
    echo "127.0.0.1 $node" >>"$folder/hosts"
    slurmd_port=$((slurmd_port + 1))
done

# --- daemons ---

(umask 077 && head -c 128 /dev/urandom >"$folder/munge.key")
daemon munged --socket="$folder/run/munge.sock" --key-file="$folder/munge.key" --pid-file="$folder/run/munged.pid" \
    --log-file="$folder/log/munged.log" --seed-file="$folder/run/munged.seed"
wait_for 10 munge --no-input --socket="$folder/run/munge.sock" || fail "munged does not answer"

daemon mariadb-install-db --no-defaults --datadir="$folder/database" --user=root --skip-test-db --skip-name-resolve \
    --innodb-log-file-size=8M || fail "mariadb-install-db"
daemon setsid --fork mariadbd --no-defaults --datadir="$folder/database" --user=root --bind-address=127.0.0.1 --port=$((port + 2)) \
    --skip-name-resolve --socket="$folder/run/mariadbd.sock" --pid-file="$folder/run/mariadbd.pid" \
    --log-error="$folder/log/mariadbd.log" --init-file="$folder/database.sql" --innodb-log-file-size=8M \
    --innodb-flush-log-at-trx-commit=0
wait_for 60 bash -c "exec 3<>/dev/tcp/127.0.0.1/$((port + 2))" || fail "mariadbd does not answer"

daemon slurmdbd
wait_for 60 sacctmgr --noheader show cluster || fail "slurmdbd does not answer"
daemon sacctmgr --immediate add cluster tests || fail "sacctmgr add cluster"

daemon slurmctld
wait_for 20 scontrol ping || fail "slurmctld does not answer"

for node in $nodes; do
    daemon "$scripts/node.sh" "$folder" "$node" || fail "slurmd of $node"
done
idle_nodes() { [ "$(sinfo --noheader --partition=low --states=idle --format=%D)" = "$(wc -w <<<"$nodes")" ]; }
export -f idle_nodes
export nodes
wait_for 60 bash -c idle_nodes || fail "the nodes did not become idle"
