#!/usr/bin/env bash
# What tests/interop runs against: install.sh [engines|dynamo|vllm-router|smg]..., all of them by default.
#
#   engines      the KV-event modules of real SGLang and vLLM releases, out of their wheels, which are
#                deleted again: 650 MB of downloads, 40 MB kept
#   dynamo       NVIDIA Dynamo's indexer and relay (280 MB; needs a C compiler)
#   vllm-router  (135 MB)
#   smg          SMG's two relays (160 MB)
#
# Everything goes under KVEVENTS_INTEROP_HOME (default ~/.cache/kvevents-interop), all versions pinned in
# requirements-NAME.txt. Can be run again: it does what is missing. One that cannot be installed is said on
# stderr, and does not stop the others. Linux x86_64, glibc 2.28 or newer, Python 3.11 or newer (PYTHON).
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
home="${KVEVENTS_INTEROP_HOME:-$HOME/.cache/kvevents-interop}"
python="${PYTHON:-python3}"
names=(engines dynamo vllm-router smg)

# venv NAME FOLDER: an environment with the pinned packages. "installed" is written last.
venv() {
  local wanted="$here/requirements-$1.txt" folder="$2" stamp
  stamp="$({ "$python" -VV; cat "$wanted"; } | sha256sum | cut -d' ' -f1)"
  [ "$(cat "$folder/installed" 2>/dev/null)" != "$stamp" ] || return 0
  [ -x "$folder/bin/python" ] || "$python" -m venv --clear "$folder"
  "$folder/bin/python" -m pip install -qq --disable-pip-version-check --only-binary=:all: -r "$wanted"
  printf '%s\n' "$stamp" >"$folder/installed"
}

# Keeps servers that listen on every interface on loopback.
shim() {
  local lib="$home/lib/loopback_bind.so" source="$here/loopback_bind.c" built
  [ ! "$lib" -nt "$source" ] || return 0
  command -v cc >/dev/null || { echo "a C compiler (cc) is needed" >&2; return 1; }
  mkdir -p "$home/lib"
  built="$(mktemp "$home/lib/.shim.XXXXXX")"
  cc -shared -fPIC -O2 -Wall -o "$built" "$source" -ldl
  chmod 755 "$built"
  mv -f "$built" "$lib"
}

one() {
  case "$1" in
    engines)
      venv engines "$home/venv"
      "$home/venv/bin/python" -B "$here/interop_fetch.py" "$home/engines"
      ;;
    dynamo)
      shim
      venv dynamo "$home/venvs/dynamo"
      ;;
    vllm-router | smg) venv "$1" "$home/venvs/$1" ;;
    *)
      echo "there are ${names[*]}" >&2
      return 2
      ;;
  esac
}

if [ "${1:-}" = --one ]; then
  mkdir -p "$home"
  if command -v flock >/dev/null; then
    exec 9>"$home/.$2.lock"
    flock -w 900 9
  fi
  one "$2"
  exit
fi
[ $# -gt 0 ] || set -- "${names[@]}"
failed=0
for name; do
  # A process of its own, for an error ends it there and then.
  if bash "${BASH_SOURCE[0]}" --one "$name"; then
    echo "$name: installed in $home"
  else
    echo "$name: cannot be installed; its tests will be skipped" >&2
    failed=1
  fi
done
exit "$failed"
