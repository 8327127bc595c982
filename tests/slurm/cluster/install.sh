#!/usr/bin/env bash
# Installs the Debian packages that the cluster needs and that are missing.
set -euo pipefail
packages=$(cat "$(dirname "$0")/packages.txt")
missing=$(dpkg-query --show --showformat='${db:Status-Status} ${Package}\n' $packages 2>&1 | grep -v '^installed ' || true)
[ -n "$missing" ] || exit 0

sudo=
[ "$(id -u)" = 0 ] || sudo=sudo
if ! command -v apt-get >/dev/null || ! command -v ${sudo:-true} >/dev/null; then
    echo "the tests on SLURM need these Debian packages, and root or sudo to install them:" $packages >&2
    exit 1
fi
$sudo apt-get update
$sudo env DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends $packages
