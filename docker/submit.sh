#!/bin/sh
# submit.sh NAME RUN…: submits a run as runs/NAME, unless there is one of that name already (below $RUNS, read-only).
set -eu
name=$1
shift
case " $* " in
*resume=true*) ;;
*)
    if [ -e "$RUNS/$name/summary.json" ]; then
        echo "error: there is a finished run '$name'; give another name: FEDHET_NAME=…" >&2
        exit 1
    elif [ -e "$RUNS/$name" ]; then
        echo "error: there is a run '$name' already; give another name, FEDHET_NAME=…, or continue this one:" \
            "FEDHET_RUN=\"… --set resume=true\"" >&2
        exit 1
    fi
    ;;
esac
exec fedhet submit "$@" --out "runs/$name"
