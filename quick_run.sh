#!/bin/sh
# Runs PostgreSQL, an S3 server, three brokers, a compactor and Prometheus as plain processes, and prints their
# addresses. `./quick_run.sh --help` shows the options. The first run makes .venv.
set -eu
cd "$(dirname "$0")"
if [ ! -x .venv/bin/python ]; then make --silent setup; fi
exec .venv/bin/python -m devtools.topology "$@"
