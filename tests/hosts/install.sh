#!/bin/sh
# Installs what emulated nodes, a look at pages and the module file need, on Debian, as root; elsewhere does nothing.
set -eu
[ "$(id -u)" = 0 ] && command -v apt-get > /dev/null || exit 0
missing=
command -v ip > /dev/null && command -v tc > /dev/null || missing=iproute2
command -v unshare > /dev/null && command -v nsenter > /dev/null || missing="$missing util-linux"
command -v slurmctld > /dev/null && command -v munged > /dev/null || missing="$missing slurm-wlm munge"
[ -e /usr/lib/x86_64-linux-gnu/pmix2/lib/libpmix.so ] || missing="$missing libpmix-dev"
command -v sshd > /dev/null && command -v ssh > /dev/null || missing="$missing openssh-server openssh-client"
command -v sshfs > /dev/null || missing="$missing sshfs"
command -v mkfs.xfs > /dev/null && command -v mkfs.btrfs > /dev/null || missing="$missing xfsprogs btrfs-progs"
command -v chromium > /dev/null || missing="$missing chromium"
[ -e /usr/lib/x86_64-linux-gnu/modulecmd.tcl ] || missing="$missing environment-modules"
[ -z "$missing" ] && exit 0
apt-get update -qq
# shellcheck disable=SC2086  # several words are several packages
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $missing
