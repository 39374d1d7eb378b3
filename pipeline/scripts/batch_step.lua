#!lua flags=allow-oom
-- Who drives a batch on: guarantees that of all the jobs for one step of a batch, only the one with the step's
-- current number works, that it works in states the step is for, and that it is given up when it does not renew.
--
--   begin   take the lease for time_ms, or renew it under the same nonce
--   end     give it up; the number rises, so that the job cannot run again, and none is asked for within time_ms
--   revive  raise the number if nobody has the lease, and it is time: the last turn is over, or whoever had it was
--           killed, or its job was lost; the next job has time_ms to begin
--
-- Numbers begin with the time at which the record was made: no job of a record that was lost has one of a new record.
--
-- KEYS  batch
-- ARGV  verb, step, number, nonce, time_ms, then the states the step is for
-- reply begin, end: 'ok' | 'over' | 'stale' | 'held';  revive: the number to run now, or '' for nothing to do
local batch, verb, step, number, nonce = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local fields = redis.call('HMGET', batch, 'state', step .. '_number', step .. '_nonce', step .. '_until_ms', 'created_ms')
local state, holder, until_ms = fields[1], fields[3] or '', tonumber(fields[4] or '0')
local current = fields[2] or fields[5] or '0'
-- A time that lies further ahead than any that is ever given: the server's clock was set back.
local waits = now_ms < until_ms and until_ms - now_ms <= 60000

local function allowed()
  for i = 6, #ARGV do
    if ARGV[i] == state then
      return true
    end
  end
  return false
end

local function set(new_number, new_nonce, new_until_ms)
  redis.call('HSET', batch, step .. '_number', new_number, step .. '_nonce', new_nonce,
    step .. '_until_ms', new_until_ms)
end

if verb == 'revive' then
  if not allowed() or waits then
    return ''
  end
  local next_number = string.format('%.0f', current + 1)
  set(next_number, '', now_ms + ARGV[5])
  return next_number
end
if not allowed() then
  return 'over'
end
if number ~= current then
  return 'stale'
end
if verb == 'begin' then
  if holder ~= '' and holder ~= nonce and waits then
    return 'held'
  end
  set(current, nonce, now_ms + ARGV[5])
  return 'ok'
end
if holder ~= nonce then
  return 'stale'
end
set(string.format('%.0f', current + 1), '', now_ms + ARGV[5])
return 'ok'
