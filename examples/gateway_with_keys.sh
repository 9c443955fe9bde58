#!/usr/bin/env bash
# A gateway with keys in front of a server: make a key with limits, use it, read the bill, revoke it.
#
#   ridgeline serve &
#   examples/gateway_with_keys.sh
#
# Everything it writes lies in a temporary folder, removed at the end.
set -euo pipefail

URL=${RIDGELINE_URL:-http://127.0.0.1:8000}
PORT=${GATEWAY_PORT:-8080}
ADMIN_PORT=${GATEWAY_ADMIN_PORT:-8081}
GATEWAY=http://127.0.0.1:$PORT

folder=$(mktemp -d)
cat >"$folder/gateway.toml" <<END
[gateway]
port = $PORT
state_dir = "$folder/state"

[admin]
port = $ADMIN_PORT

[[upstreams]]
name = "local"
url = "$URL"

[[models]]
name = "fast"
targets = ["local/smollm2-135m"]
price_in = 0.05    # US dollars per million tokens
price_out = 0.20
END

ridgeline gateway --config "$folder/gateway.toml" >"$folder/gateway.log" 2>&1 &
gateway=$!
trap 'kill $gateway 2>/dev/null || true; wait $gateway || true; rm -rf "$folder"' EXIT
for _ in $(seq 300); do
  curl --silent --fail "$GATEWAY/ready" >/dev/null && break
  kill -0 $gateway || { cat "$folder/gateway.log"; exit 1; }
  sleep 0.2
done

export RIDGELINE_ADMIN_URL=http://127.0.0.1:$ADMIN_PORT RIDGELINE_ADMIN_KEY_FILE=$folder/state/admin-key

echo '--- a key: 60 requests per minute, $5 per day'
KEY=$(ridgeline gateway keys create --name app --rpm 60 --daily-usd 5)

ask() {
  curl --silent --write-out '\nHTTP %{http_code}\n' "$GATEWAY/v1/chat/completions" \
    --header "authorization: Bearer $1" --header 'content-type: application/json' \
    --data '{"model": "fast", "temperature": 0, "max_tokens": 32,
             "messages": [{"role": "user", "content": "What is 2+2?"}]}'
}
echo '--- a request with the key'
ask "$KEY"
echo '--- a request with a wrong key'
ask wrong-key

echo '--- what was used'
ridgeline gateway usage --by key,model

echo '--- the key is revoked'
ridgeline gateway keys revoke app
ask "$KEY"
