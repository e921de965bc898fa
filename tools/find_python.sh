#!/bin/sh
# Prints the first Python found of the versions given ("3.12 3.13"): $PYTHON, python3, python3.X, then pyenv's.
# SPDX-License-Identifier: Apache-2.0

wanted="$*"

version_of() {
  "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

fits() {
  found=$(version_of "$1") || return 1
  for version in $wanted; do
    [ "$found" = "$version" ] && return 0
  done
  return 1
}

if [ -n "$PYTHON" ]; then
  if fits "$PYTHON"; then
    echo "$PYTHON"
    exit 0
  fi
  echo "PYTHON=$PYTHON is $(version_of "$PYTHON" || echo "not a Python"); one of $wanted is needed." >&2
  exit 1
fi

candidates=python3
for version in $wanted; do
  candidates="$candidates python$version"
done
for root in "$PYENV_ROOT" "$HOME/.pyenv"; do
  for version in $wanted; do
    candidates="$candidates $(ls -d "$root/versions/$version".*/bin/python 2>/dev/null | sort -V | tr '\n' ' ')"
  done
done
for candidate in $candidates; do
  if fits "$candidate"; then
    command -v "$candidate"
    exit 0
  fi
done
echo "No Python $wanted was found (looked for python3, versioned names and pyenv's); install one, or name it: make PYTHON=/path/to/python ..." >&2
exit 1
