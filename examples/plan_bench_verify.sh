#!/usr/bin/env bash
# Plan, measure, check the plan: predict what a server on this machine will measure, measure it, print the errors.
#
#   examples/plan_bench_verify.sh [FOLDER]        # default folder: a new one under the temporary folder
#
# It starts its own server with the plan's settings. REQUESTS=20 keeps it to a minute; more requests narrow the
# measured intervals. Without `ridgeline plan fit` step times come from first principles, and the prediction is wide.
set -euo pipefail

MODEL=${MODEL:-smollm2-135m}
PORT=${PORT:-8000}
REQUESTS=${REQUESTS:-20}
SLO=${SLO:-ttft_p90=5s,tpot_p90=500ms}
folder=${1:-$(mktemp -d)}
traffic=(--input 128 --output 32 --rate 1 --requests "$REQUESTS")

echo '--- plan'
ridgeline plan "$MODEL" --hardware cpu "${traffic[@]}" --slo "$SLO" --out "$folder/plan"

echo '--- serve with the plan'
ridgeline serve --config "$folder/plan/plan.toml" --port "$PORT" --state-dir "$folder/state" >"$folder/serve.log" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null || true; wait $server || true' EXIT
for _ in $(seq 600); do
  curl --silent --fail "http://127.0.0.1:$PORT/ready" >/dev/null && break
  kill -0 $server || { cat "$folder/serve.log"; exit 1; }
  sleep 0.2
done

echo '--- bench'
force=()
ridgeline bench "http://127.0.0.1:$PORT" "${traffic[@]}" --warmup 2 --no-selftest --out "$folder/run" || force=(--force)

# An invalid run (the machine was busy) is scored with --force, and later plans do not learn from it.
echo '--- verify'
ridgeline plan verify "$folder/plan/prediction.json" "$folder/run" "${force[@]}"
echo "report: $folder/run/report.html"
