#!/bin/bash
# slurm_box.sh FOLDER COMMAND ... runs a command alongside a one-node Slurm, in namespaces that end
# with the command. Needs root, slurmctld, slurmd and munged. FOLDER keeps the logs.
set -e
folder=$1
shift
if [ "$SLURM_BOX" != inside ]; then
  exec env SLURM_BOX=inside unshare --net --uts --pid --mount --fork --kill-child --mount-proc "$0" "$folder" "$@"
fi

# Slurm only listens on an interface other than loopback.
hostname box
ip link set lo up
ip link add eth0 type veth peer name eth1
ip link set eth1 up
ip address add 10.78.0.1/24 dev eth0
ip link set eth0 up
printf '127.0.0.1 localhost\n10.78.0.1 box\n' > "$folder/hosts"
mount --bind "$folder/hosts" /etc/hosts
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /dev/shm # another box's MPICH may have left shared memory there
mkdir -p /run/munge "$folder/state" "$folder/spool"

head -c 1024 /dev/urandom > "$folder/munge.key"
chmod 400 "$folder/munge.key"
munged --force --key-file="$folder/munge.key" --socket=/run/munge/munge.socket.2 \
  --log-file="$folder/munged.log" --pid-file=/run/munge.pid --seed-file="$folder/seed"

# cred_expire: a requeued job may restart after this many seconds (default 120).
cat > "$folder/slurm.conf" << CONF
ClusterName=box
SlurmctldHost=box
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=60
GresTypes=gpu
NodeName=box CPUs=64 Gres=gpu:8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
touch "$folder"/gpu{0..7}
echo "NodeName=box Name=gpu File=$folder/gpu[0-7]" > "$folder/gres.conf"
export SLURM_CONF=$folder/slurm.conf
slurmctld
slurmd
for _ in {1..100}; do
  sinfo --noheader --format=%t 2> /dev/null | grep -q idle && break
  sleep 0.2
done
"$@"
