#!/bin/sh
# submit.sh NAME RUN…: submits a run as runs/NAME, unless that run already exists in $RUNS (read-only).
set -eu
name=$1
shift
case " $* " in
*resume=true*) ;;
*)
    if [ -e "$RUNS/$name/summary.json" ]; then
        echo "error: FEDHET_NAME: the finished run '$name' exists. Choose another name." >&2
        exit 1
    elif [ -e "$RUNS/$name" ]; then
        echo "error: FEDHET_NAME: the run '$name' exists. Choose another name, or resume the run with" \
            "FEDHET_RUN=\"… --set resume=true\"" >&2
        exit 1
    fi
    ;;
esac
exec fedhet submit "$@" --out "runs/$name"
