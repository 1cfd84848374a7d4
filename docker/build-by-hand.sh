#!/bin/sh
# Shows without Docker that docker/Dockerfile works: every instruction of it, as it stands there, is carried out on a
# fresh Debian with the same Python; then the result is started as its user, with a read-only root and a network of its
# own, and has to become healthy, serve a worker, and end in order. Twice, to see that the same files come out.
#
#   docker/build-by-hand.sh [FOLDER]        FOLDER: where the roots are made, and kept; else a temporary one
#   POD=yes docker/build-by-hand.sh         the engine's too (200 MB of torch), and both as the pod of kubernetes/base
#   BUILD_ARGS="--build-arg SOURCE_DATE_EPOCH=1" docker/build-by-hand.sh
#
# As root, with mmdebstrap and python3; POD needs PyYAML. Not shown: what the builder does with layers and times.
set -eu
cd "$(dirname "$0")/.."
[ "$(id -u)" = 0 ] || { echo "build-by-hand: must be root, to make a root" >&2; exit 2; }
command -v mmdebstrap >/dev/null || { echo "build-by-hand: needs mmdebstrap" >&2; exit 2; }

if [ $# -gt 0 ]; then
    work=$1
    mkdir -p "$work"
else
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi

# ARG PYTHON_IMAGE=python:VERSION-slim-RELEASE says which Python, of which Debian.
image=$(sed -n 's/^ARG PYTHON_IMAGE=//p' docker/Dockerfile)
version=$(expr "$image" : 'python:\([0-9.]*\)-slim-')
release=$(expr "$image" : 'python:[0-9.]*-slim-\([a-z]*\)$')
base=$work/base-$release
if [ ! -e "$base/usr/local/bin/pip" ]; then
    mmdebstrap --quiet --variant=minbase --include=python3,python3-venv,ca-certificates "$release" "$base" \
        "${DEBIAN_MIRROR:-http://deb.debian.org/debian}"
    chroot "$base" python3 -m venv /usr/local   # where the image has python and pip
fi
chroot "$base" python --version | grep -F "Python $version." ||
    { echo "build-by-hand: $release has another Python than $image" >&2; exit 1; }

build() {   # NAME DOCKERFILE
    rm -rf "${work:?}/$1"
    mkdir "$work/$1"
    # shellcheck disable=SC2086 # words
    python3 -m docker.by_hand "$2" "$base" "$work/$1" ${BUILD_ARGS:-}
}

in_namespaces() {
    unshare --mount --net --pid --fork --mount-proc python3 -m "$@"
}

build sidecar docker/Dockerfile
in_namespaces docker.by_hand.trial "$work/sidecar"
build again docker/Dockerfile > /dev/null
cmp "$work/sidecar/files" "$work/again/files"
echo "ok: built again, the same $(wc -l < "$work/sidecar/files") files, by mode and content"
if [ -n "${POD-}" ]; then
    build engine docker/engine.Dockerfile
    in_namespaces docker.by_hand.pod "$work/sidecar" "$work/engine"
fi
