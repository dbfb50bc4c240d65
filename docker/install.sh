#!/bin/sh
# Install jpaged into a new virtual environment: sh install.sh FOLDER REQUIREMENT
# REQUIREMENT is what pip installs, such as a source folder, a wheel, or "/src[cuda13]".
set -eu
python3 -m venv "$1"
"$1/bin/pip" install --no-cache-dir "$2"
"$1/bin/jpaged" --version
