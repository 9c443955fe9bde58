"""The limiter's Lua scripts for Redis: a reservation must check all subjects and then take, atomically.

The clock is Redis' own, so the gateways' clocks do not matter. Keys of a subject, after its name:
`` (hash) the window: r, t = requests, tokens in it; o, n = its oldest and newest bucket; r123, t123 = buckets
`:l` (sorted set) requests under way, by when they no longer count; `:o` (hash) what these may cost, and `sum`
`:h` (sorted set), `:b` (hash) the same for background work, which outlives its request, as a batch does
`:m` (hash) money: d, ds = day, spent on it; m, ms = month, spent in it; c = compared with the ledger at;
            s = last taken from the ledger at
Everything expires. Numbers of picodollars stay strings where they are added: Lua's are exact up to 2^53 only.
"""

from __future__ import annotations

from ridgeline.gateway.limits.limiter_types import BUCKET_MS, BUCKETS, CONCURRENT_RETRY_MS, DAY_MS

HOLD_LEASES = 120  # background work without a gateway counts for this many leases

_PRELUDE = (
    f"""
local WIDTH, BUCKETS, DAY, RETRY = {BUCKET_MS}, {BUCKETS}, {DAY_MS}, {CONCURRENT_RETRY_MS}
local WINDOW_TTL, MONEY_TTL, SETTLED_TTL = {(BUCKETS + 5) * BUCKET_MS}, {35 * DAY_MS}, 300000
local HOLD_LEASES = {HOLD_LEASES}
"""
    + """
local call, floor = redis.call, math.floor

local function clock(given)
  if given ~= '0' then return tonumber(given) end
  local t = call('TIME')
  return t[1] * 1000 + floor(t[2] / 1000)
end

-- The window of a subject, moved on to `bucket`: its requests, tokens, oldest and newest bucket, the current
-- one, and what is in that. A clock that was set back goes on in the newest bucket; if that is more than a
-- minute ahead, all of the window counts as of now.
local function window(key, bucket)
  local w = call('HMGET', key, 'r', 't', 'o', 'n', 'r' .. bucket, 't' .. bucket)
  if not w[3] then return 0, 0, bucket, bucket, bucket, 0, 0 end
  local requests, tokens = tonumber(w[1]), tonumber(w[2])
  local oldest, newest, gone = tonumber(w[3]), tonumber(w[4]), bucket - BUCKETS - 1
  if newest <= gone then
    call('DEL', key)
    return 0, 0, bucket, bucket, bucket, 0, 0
  end
  if newest > bucket + BUCKETS then
    call('DEL', key)
    call('HSET', key, 'r', requests, 't', tokens, 'o', bucket, 'n', bucket, 'r' .. bucket, requests,
         't' .. bucket, tokens)
    call('PEXPIRE', key, WINDOW_TTL)
    return requests, tokens, bucket, bucket, bucket, requests, tokens
  end
  if newest > bucket then return window(key, newest) end
  if oldest <= gone then
    local fields = {}
    for i = oldest, gone do
      fields[#fields + 1] = 'r' .. i
      fields[#fields + 1] = 't' .. i
    end
    local counts = call('HMGET', key, unpack(fields))
    for i = 1, #fields, 2 do
      requests = requests - (counts[i] or 0)
      tokens = tokens - (counts[i + 1] or 0)
    end
    call('HDEL', key, unpack(fields))
    oldest = gone + 1
    call('HSET', key, 'r', requests, 't', tokens, 'o', oldest)
  end
  return requests, tokens, oldest, newest, bucket, tonumber(w[5] or 0), tonumber(w[6] or 0)
end

-- A request has ended, or its gateway has died: it counts no longer. `leases` and `costs` are ':l' and ':o',
-- or ':h' and ':b' for background work.
local function release(key, id, leases, costs)
  call('ZREM', key .. leases, id)
  local cost = call('HGET', key .. costs, id)
  if cost then
    call('HDEL', key .. costs, id)
    if cost ~= '0' then call('HINCRBY', key .. costs, 'sum', '-' .. cost) end
  end
end

local function release_expired(key, now, leases, costs)
  for _, id in ipairs(call('ZRANGEBYSCORE', key .. leases, '-inf', now, 'LIMIT', 0, 100)) do
    release(key, id, leases, costs)
  end
end

-- What background work may cost from now on.
local function hold(key, id, cost, now, lease)
  local ttl = HOLD_LEASES * lease
  release(key, id, ':h', ':b')
  call('HSET', key .. ':b', id, cost)
  call('HINCRBY', key .. ':b', 'sum', cost)
  call('ZADD', key .. ':h', now + ttl, id)
  call('PEXPIRE', key .. ':b', 2 * ttl)
  call('PEXPIRE', key .. ':h', 2 * ttl)
end

-- What all that has not ended may cost.
local function open_cost(key)
  return tonumber(call('HGET', key .. ':o', 'sum') or 0) + tonumber(call('HGET', key .. ':b', 'sum') or 0)
end

-- Days since 1970, and months since the year 0 (the calendar's eras of 400 years begin in March).
local function calendar(ms)
  local day = floor(ms / DAY)
  local z = day + 719468
  local era = floor(z / 146097)
  local doe = z - era * 146097
  local yoe = floor((doe - floor(doe / 1460) + floor(doe / 36524) - floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + floor(yoe / 4) - floor(yoe / 100))
  local march = floor((5 * doy + 2) / 153)
  return day, (yoe + era * 400) * 12 + march + 2
end

-- What a subject has spent today and this month, or nothing where that is not known here.
local function spending(key, now)
  local m = call('HMGET', key .. ':m', 'd', 'ds', 'm', 'ms')
  if not m[1] then return nil end
  local day, month = calendar(now)
  if tonumber(m[1]) < day then
    call('HSET', key .. ':m', 'd', day, 'ds', 0)
    m[1], m[2] = day, 0
  end
  if tonumber(m[3]) < month then
    call('HSET', key .. ':m', 'm', month, 'ms', 0)
    m[3], m[4] = month, 0
  end
  return tonumber(m[1]), tonumber(m[2]), tonumber(m[3]), tonumber(m[4])
end

-- When `need` of what is in the window will have left it.
local function room_in(key, field, oldest, newest, need, now)
  local fields = {}
  for i = oldest, newest do fields[#fields + 1] = field .. i end
  local counts = call('HMGET', key, unpack(fields))
  for i = 1, #fields do
    need = need - (counts[i] or 0)
    if need <= 0 then return (oldest + i + BUCKETS) * WIDTH - now end
  end
  return BUCKETS * WIDTH
end
"""
)

# KEYS: subjects. ARGV: id, now, tokens, cost, lease; tokens and cost that must be left, which may be more
# than are taken; 1 for background work; per subject: requests, tokens, concurrent, daily, monthly (-1: no
# such limit); per subject 1, or 0 where it does not count this id as a new request; and after how long
# spending is compared with the ledger again.
# Answers "status now" and per subject "requests-left tokens-left reset". Then, by status, 0 (taken): subjects
# to compare with the ledger; 1 (refused): subject, unit, milliseconds; 2 (nothing done): subjects whose
# spending is not known here.
RESERVE = (
    _PRELUDE
    + """
local id, now, tokens, cost = ARGV[1], clock(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local lease, least_tokens, least_cost, n = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), #KEYS
local is_background = ARGV[8] == '1'
local windows, tail, status, head = {}, {}, 0, {}
for s = 1, n do
  local key, a = KEYS[s], 8 + (s - 1) * 5
  local new = tonumber(ARGV[8 + n * 5 + s])
  local rpm, tpm, concurrent = tonumber(ARGV[a + 1]), tonumber(ARGV[a + 2]), tonumber(ARGV[a + 3])
  local daily, monthly = tonumber(ARGV[a + 4]), tonumber(ARGV[a + 5])
  local rleft, tleft, reset = 0, 0, 0
  if rpm >= 0 or tpm >= 0 then
    local w = {window(key, floor(now / WIDTH))}
    local r, t, oldest, newest = w[1], w[2], w[3], w[4]
    windows[s] = w
    if rpm >= 0 and r + new > rpm then
      tail[#tail + 1] = {s, 0, room_in(key, 'r', oldest, newest, r + new - rpm, now)}
    end
    if tpm >= 0 and least_tokens > 0 and t + least_tokens > tpm then
      tail[#tail + 1] = {s, 1, room_in(key, 't', oldest, newest, t + least_tokens - tpm, now)}
    end
    rleft, tleft = rpm - r, tpm - t
    if r > 0 or t > 0 then reset = (newest + BUCKETS + 1) * WIDTH - now end
  end
  if concurrent >= 0 or daily >= 0 or monthly >= 0 then
    release_expired(key, now, ':l', ':o')
    if new == 1 and concurrent >= 0 and call('ZCOUNT', key .. ':l', '(' .. now, '+inf') >= concurrent then
      tail[#tail + 1] = {s, 2, RETRY}
    end
  end
  if daily >= 0 or monthly >= 0 then
    local day, spent_day, _, spent_month = spending(key, now)
    if not day then
      if status ~= 2 then status, tail = 2, {} end
      tail[#tail + 1] = {s}
    elseif least_cost > 0 then
      release_expired(key, now, ':h', ':b')
      local open = open_cost(key) + least_cost
      if daily >= 0 and spent_day + open > daily then tail[#tail + 1] = {s, 3, 0} end
      if monthly >= 0 and spent_month + open > monthly then tail[#tail + 1] = {s, 4, 0} end
    end
  end
  head[s] = {rleft, tleft, reset}
end
if status == 2 then
  local out = {'2', string.format('%.0f', now)}
  for _, item in ipairs(tail) do
    if #item == 1 then out[#out + 1] = item[1] end
  end
  return table.concat(out, ' ')
end
if #tail > 0 then status = 1 end
local out = {status, string.format('%.0f', now)}
for s = 1, n do
  local h = head[s]
  if status == 0 then
    local key, a, w = KEYS[s], 8 + (s - 1) * 5, windows[s]
    local new = tonumber(ARGV[8 + n * 5 + s])
    if w then
      local b = w[5]
      call('HSET', key, 'r', w[1] + new, 't', w[2] + tokens, 'o', w[3], 'n', b, 'r' .. b, w[6] + new,
           't' .. b, w[7] + tokens)
      call('PEXPIRE', key, WINDOW_TTL)
      h[1], h[2], h[3] = h[1] - new, h[2] - tokens, (b + BUCKETS + 1) * WIDTH - now
    end
    local budget = ARGV[a + 4] ~= '-1' or ARGV[a + 5] ~= '-1'
    if not is_background and (budget or ARGV[a + 3] ~= '-1') then
      call('ZADD', key .. ':l', now + lease, id)
      call('PEXPIRE', key .. ':l', 2 * lease)
    end
    if budget then
      if is_background then
        hold(key, id, ARGV[4], now, lease)
      elseif cost > 0 then
        call('HSET', key .. ':o', id, ARGV[4])
        call('HINCRBY', key .. ':o', 'sum', ARGV[4])
        call('PEXPIRE', key .. ':o', 2 * lease)
      end
      if now > tonumber(call('HGET', key .. ':m', 'c')) + tonumber(ARGV[#ARGV]) then
        call('HSET', key .. ':m', 'c', now)
        tail[#tail + 1] = {s}
      end
    end
  end
  for i = 1, 3 do out[#out + 1] = h[i] end
end
for _, item in ipairs(tail) do
  for _, value in ipairs(item) do out[#out + 1] = value end
end
return table.concat(out, ' ')
"""
)

# KEYS: the reservation's mark, subjects. ARGV: id, now, reserved at, arrived at (0: never), tokens more than
# reserved, cost, how long ago it ended; per subject the letters of what it has: t(okens), l(ease), h(old of
# background work), m(oney).
SETTLE = (
    _PRELUDE
    + """
if not call('SET', KEYS[1], '1', 'NX', 'PX', SETTLED_TTL) then return 0 end
local id, now, at, more = ARGV[1], clock(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[5])
local arrived, cost, ended = tonumber(ARGV[4]), ARGV[6], now - tonumber(ARGV[7])
if at == 0 then at = now end
if arrived == 0 then arrived = now end
for s = 2, #KEYS do
  local key, has = KEYS[s], ARGV[6 + s]
  if more ~= 0 and string.find(has, 't', 1, true) then
    local requests, tokens, oldest, newest, bucket, _, current = window(key, floor(now / WIDTH))
    if more > 0 then
      call('HSET', key, 'r', requests, 't', tokens + more, 'o', oldest, 'n', bucket,
           't' .. bucket, current + more)
      call('PEXPIRE', key, WINDOW_TTL)
    else
      local field = 't' .. floor(at / WIDTH)
      if tonumber(call('HGET', key, field) or 0) >= -more then
        call('HINCRBY', key, field, more)
        call('HINCRBY', key, 't', more)
      end
    end
  end
  if string.find(has, 'l', 1, true) then release(key, id, ':l', ':o') end
  if string.find(has, 'h', 1, true) then release(key, id, ':h', ':b') end
  if cost ~= '0' and string.find(has, 'm', 1, true) then
    local current_day, _, current_month = spending(key, now)
    -- What had ended when the ledger was asked is in what the ledger said; after a clock was set back, all
    -- counts.
    local asked = current_day and tonumber(call('HGET', key .. ':m', 's'))
    if current_day and (asked <= ended or now < asked) then
      local day, month = calendar(arrived)
      -- A clock that was set back over midnight spends of the later day, which is the one that is counted.
      local today, this_month = calendar(now)
      if today < current_day then day = current_day end
      if this_month < current_month then month = current_month end
      if day == current_day then call('HINCRBY', key .. ':m', 'ds', cost) end
      if month == current_month then call('HINCRBY', key .. ':m', 'ms', cost) end
    end
  end
end
return 1
"""
)

# KEYS: the reservation's mark, subjects with a budget. ARGV: id, now, cost, lease; per subject its limits as
# above. Answers "status now". Status 0: then what each subject has left; 1: it has been settled; 2: the
# subjects whose spending is not known here. The cost is held all the same.
HOLD = (
    _PRELUDE
    + """
local id, now, cost, lease = ARGV[1], clock(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local out, unknown = {0, string.format('%.0f', now)}, {2, string.format('%.0f', now)}
if call('EXISTS', KEYS[1]) == 1 then return '1 ' .. out[2] end
for s = 2, #KEYS do
  release_expired(KEYS[s], now, ':h', ':b')
  hold(KEYS[s], id, cost, now, lease)
  if not spending(KEYS[s], now) then unknown[#unknown + 1] = s - 1 end
end
if #unknown > 2 then return table.concat(unknown, ' ') end
for s = 2, #KEYS do
  local key, a = KEYS[s], 4 + (s - 2) * 5
  local daily, monthly = tonumber(ARGV[a + 4]), tonumber(ARGV[a + 5])
  local _, spent_day, _, spent_month = spending(key, now)
  local open, room = open_cost(key), math.huge
  if daily >= 0 then room = daily - spent_day - open end
  if monthly >= 0 then room = math.min(room, monthly - spent_month - open) end
  out[#out + 1] = string.format('%.0f', room)
end
return table.concat(out, ' ')
"""
)

# KEYS: a subject for each request that is still under way. ARGV: now, lease, ids.
RENEW = (
    _PRELUDE
    + """
local now, lease = clock(ARGV[1]), tonumber(ARGV[2])
for i = 1, #KEYS do
  call('ZADD', KEYS[i] .. ':l', now + lease, ARGV[i + 2])
  call('PEXPIRE', KEYS[i] .. ':l', 2 * lease)
  call('PEXPIRE', KEYS[i] .. ':o', 2 * lease)
end
return #KEYS
"""
)

# KEYS: a subject. ARGV: now, day, spent on it, month, spent in it: by the ledger. The larger counts: rows may
# not have been written yet, and what a dead gateway had under way is in the ledger only.
SEED = (
    _PRELUDE
    + """
local key, now = KEYS[1] .. ':m', clock(ARGV[1])
local day, spent_day, month, spent_month = spending(KEYS[1], now)
if not day then
  call('HSET', key, 'd', ARGV[2], 'ds', ARGV[3], 'm', ARGV[4], 'ms', ARGV[5], 's', now)
else
  if day == tonumber(ARGV[2]) and tonumber(ARGV[3]) > spent_day then
    call('HSET', key, 'ds', ARGV[3], 's', now)
  end
  if month == tonumber(ARGV[4]) and tonumber(ARGV[5]) > spent_month then
    call('HSET', key, 'ms', ARGV[5], 's', now)
  end
end
call('HSET', key, 'c', now)
call('PEXPIRE', key, MONEY_TTL)
return 1
"""
)
